# SPDX-License-Identifier: Apache-2.0
"""What is counted and reported; and the whole run with a clock that stands in for a GPU's."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlk.bench import bandwidth, measure, variants
from rlk.bench.timing import Time
from rlk.bench.work import Work, works
from rlk.cuda import build, toolchain
from rlk.errors import BackendError, RlkError
from rlk.operator import FLOATS, Operator, Reduction, Scalar, Tensor, Workload

DEMO = Operator(
    name="demo", package="rlk_test", bits_version=1, formula="y = x * gate * weight",
    inputs=(
        Tensor("x", ("...", "N"), FLOATS, gradient="row"),
        Tensor("gate", ("...", "N"), ("=x",), gradient="row"),
        Tensor("weight", ("N",), ("=x", "float32"), gradient="parameter"),
    ),
    scalars=(Scalar("scale", 1.0), Scalar("mode", 2.0, fixed=True)),
    outputs=(Tensor("y", ("...", "N"), ("=x",)),), saved=(),
    reductions=(Reduction("dweight", "exact_sum", "T"),), category="elementwise", claims=(),
    workloads=(Workload("somewhere", {"T": 1000, "N": 128}),),
    oracle=lambda x, gate, weight, *, scale, mode: (x * gate * weight * scale,), backends=(),
)  # fmt: skip
WORK = Work(DEMO, "somewhere", {"T": 1000, "N": 128}, torch.bfloat16)


def test_work_least_bytes_count_each_input_and_output_once():
    rows, columns = 1000 * 128 * 2, 128 * 2
    assert WORK.least_bytes("forward") == 3 * rows + columns
    # dy, x, gate and weight are read, dx, dgate and dweight written.
    assert WORK.least_bytes("backward") == 5 * rows + 2 * columns
    assert WORK.streams("forward") == (2, 1)
    assert WORK.streams("backward") == (3, 2)


def test_work_of_a_linear_operator_reads_no_input_again_for_its_gradient():
    linear = replace(
        DEMO,
        inputs=(DEMO.inputs[0], Tensor("table", ("...", "M"), ("float32",))),
        linear=True,
    )
    work = Work(linear, "", {"T": 1000, "N": 128, "M": 32}, torch.bfloat16)
    rows, table = 1000 * 128 * 2, 1000 * 32 * 4
    assert work.least_bytes("forward") == work.least_bytes("backward") == 2 * rows + table
    assert work.streams("forward") == work.streams("backward") == (2, 1)


def test_work_streams_are_the_tensors_whose_bytes_count():
    sample = Tensor("x", ("...", "S", "N"), FLOATS, gradient="row")
    scale = Tensor("scale", ("...", "N"), ("=x",), gradient="row")
    modulated = replace(
        DEMO, inputs=(sample, scale), outputs=(Tensor("y", ("...", "S", "N"), ("=x",)),)
    )

    def streams(operator, **sizes):
        work = Work(operator, "", sizes, torch.bfloat16)
        return work.streams("forward"), work.streams("backward")

    assert streams(modulated, T=2, S=3, N=64) == ((1, 1), (2, 1))
    assert streams(modulated, T=2, S=2, N=64) == ((2, 1), (3, 2))
    # Few rows beside a matrix, whose forward writes nothing that counts.
    matrix = Tensor("weight", ("M", "N"), ("=x",), gradient="chain")
    product = replace(
        DEMO, inputs=(DEMO.inputs[0], matrix), outputs=(Tensor("y", ("...", "M"), ("=x",)),)
    )
    assert streams(product, T=2, N=64, M=256) == ((1, 1), (1, 1))


def test_work_sets_rotate_through_150_megabytes_or_400_sets():
    large = Work(DEMO, "", {"T": 262144, "N": 128}, torch.bfloat16)
    assert large.sets == 3
    assert Work(DEMO, "", {"T": 10**7, "N": 128}, torch.bfloat16).sets == 2
    assert Work(DEMO, "", {"T": 1, "N": 128}, torch.bfloat16).sets == 400
    # A matrix beside few rows: 400 sets of it would fill a GPU.
    matrix = Tensor("weight", ("M", "N"), ("=x",), gradient="chain")
    product = replace(DEMO, inputs=(DEMO.inputs[0], matrix))
    sizes = {"T": 1, "N": 4096, "M": 16384}
    assert Work(product, "", sizes, torch.bfloat16).sets == 2


def test_scaled_rows_of_any_number_of_axes_have_one_scale_each():
    torch.manual_seed(0)
    dy = torch.ones(5, 3, 4)
    scaled = measure.scaled_rows(dy)
    assert torch.equal(scaled, scaled[:, :1, :1].expand_as(dy))
    assert len(scaled[:, 0, 0].unique()) > 1


def test_works_of_an_operator_are_its_workloads_and_further_rows():
    found = works(DEMO, torch.float32, [64, 1000])
    assert [work.label for work in found] == ["1000x128", "64x128"]


def test_works_of_more_rows_than_fit_are_left_out():
    fits, not_fits = 2_000_000_000 // (128 * 2), 2_000_000_000 // (128 * 2) + 1
    found = works(DEMO, torch.bfloat16, [fits, not_fits])
    assert [work.sizes["T"] for work in found] == [1000, fits]


HEADS = replace(
    DEMO,
    inputs=(
        Tensor("q", ("...", "H", "D"), FLOATS, gradient="row"),
        Tensor("k", ("...", "G", "D"), ("=q",), gradient="row"),
        Tensor("table", ("...", "P"), ("float32",)),
    ),
    outputs=(Tensor("y", ("...", "H", "D"), ("=q",)),), scalars=(Scalar("scale", 1.0),),
    row_axes=("B", "S"), linear=True,
    workloads=(
        Workload(
            "somewhere", {"T": 6, "H": 4, "G": 2, "D": 8, "P": 3}, {"width": 4},
            scalars={"scale": 2.0}, layouts=("packed", "contiguous"),
        ),
    ),
)  # fmt: skip


def test_works_of_several_layouts_say_shapes_arguments_and_layout():
    found = works(HEADS, torch.float32, [7])
    label = "1x{0}x4x8 and 1x{0}x2x8 scale=2.0 width=4"
    assert [(work.label, work.layout) for work in found] == [
        (label.format(rows), layout) for rows in (6, 7) for layout in ("packed", "contiguous")
    ]
    assert found[0].scalars() == {"scale": 2.0}
    chosen = works(HEADS, torch.float32, [], ["contiguous"])
    assert [work.layout for work in chosen] == ["contiguous"]


def test_work_packed_inputs_are_views_of_one_storage_of_three():
    packed, plain = works(HEADS, torch.bfloat16, [])
    q, k, table = packed.inputs(0, "cpu")
    # Query, key and value of a projection: heads of q, of k, and as many again as of k.
    assert (q.shape, k.shape) == ((1, 6, 4, 8), (1, 6, 2, 8))
    assert q.stride() == k.stride() == (6 * 8 * 8, 8 * 8, 8, 1)
    assert k.data_ptr() - q.data_ptr() == 4 * 8 * q.element_size()
    assert q.untyped_storage().nbytes() == 6 * 8 * 8 * q.element_size()
    assert (q.requires_grad, k.requires_grad, table.requires_grad) == (True, True, False)
    assert table.is_contiguous()
    (other, *_) = packed.inputs(1, "cpu")
    assert other.untyped_storage().data_ptr() != q.untyped_storage().data_ptr()
    assert all(t.is_contiguous() for t in packed.upstream(0, "cpu") + plain.inputs(0, "cpu"))


def test_work_packed_single_input_is_a_third_of_its_storage():
    work = Work(DEMO, "", {"T": 5, "N": 4}, torch.float32, layout="packed")
    x, gate, weight = work.inputs(0, "cpu")
    assert x.stride() == gate.stride() == (3 * 4, 1)
    assert weight.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    alone = replace(HEADS, inputs=(HEADS.inputs[0],))
    (q,) = Work(alone, "", {"T": 5, "H": 2, "D": 4}, torch.float32, layout="packed").inputs(
        0, "cpu"
    )
    assert q.stride() == (5 * 3 * 2 * 4, 3 * 2 * 4, 4, 1)


def test_work_floor_counts_no_bytes_between_packed_tensors():
    packed, plain = works(HEADS, torch.bfloat16, [])
    for direction in ("forward", "backward"):
        assert packed.least_bytes(direction) == plain.least_bytes(direction)
    # q, k, the table of FP32 and y.
    assert packed.least_bytes("forward") == 6 * ((4 + 2) * 8 * 2 + 3 * 4 + 4 * 8 * 2)


def test_work_packed_inputs_of_unlike_rows_are_refused():
    unlike = replace(
        HEADS, inputs=(HEADS.inputs[0], Tensor("k", ("...", "H", "P"), ("=q",), "row"))
    )
    sizes = {"T": 6, "H": 4, "D": 8, "P": 3}
    with pytest.raises(RlkError, match=r"packed tensors .* got \[\[4, 8\], \[4, 3\]\]; choose"):
        Work(unlike, "", sizes, torch.float32, layout="packed").inputs(0, "cpu")


def test_time_of_samples_is_their_median_and_half_the_quartile_distance():
    assert Time.of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == Time(4.0, 2.0)


def test_floor_of_other_bytes_is_in_proportion():
    floor = bandwidth.Floor(Time(50.0, 1.0), 200_000_000, "unroll 4, tiled")
    assert floor.us(100_000_000) == 25.0
    assert floor.terabytes_per_second == 4.0


def test_probe_kernel_compiles_without_a_gpu():
    if toolchain.nvcc_missing() is not None:
        pytest.skip("needs nvcc")
    compiled = build.compile_only(bandwidth.SOURCE, "bandwidth", bandwidth.GENERATED, "sm_90")
    moves = [used for name, used in compiled.resources.items() if "move" in name]
    assert len(moves) == 4 * 4 * len(bandwidth.UNROLLS)
    assert all(used.spill_stores == 0 for used in moves)


@pytest.fixture
def on_the_cpu(eager_clock, monkeypatch):
    """A size that is measured by a clock of its own, and four variants."""
    floor = bandwidth.Floor(Time(10.0, 0.5), WORK.least_bytes("forward"), "unroll 4, tiled")
    monkeypatch.setattr(bandwidth, "floor", lambda work, direction, stream: floor)
    few = Work(DEMO, "somewhere", {"T": 20, "N": 128}, torch.bfloat16)

    def product(x, gate, weight):
        return x * gate * weight

    def failing(x, gate, weight):
        raise RuntimeError("no kernel\nfor this")

    taking_part = [
        variants.Variant("cuda", "", product, ours=True),
        variants.Variant("torch.compile", "2", product),
        variants.Variant("absent", "", None, "not installed", verdict="not applicable"),
        variants.Variant("broken", "1", failing),
    ]
    monkeypatch.setattr(measure, "variants", lambda *arguments: taking_part)
    return few


def test_measure_every_variant_gets_a_row_beside_the_floor(on_the_cpu):
    rows = {row.variant: row for row in measure.measure(on_the_cpu)}
    assert list(rows) == ["floor", "cuda", "torch.compile", "absent", "broken"]
    ours = rows["cuda"]
    assert (ours.forward_us, ours.both_us, ours.peer_ratio) == (30.0, 60.0, 1.0)
    assert ours.extra_mib == 2.0
    assert (ours.host_us, ours.host_grad_us, ours.host_train_us) == (20.0, 30.0, 20.0)
    assert (ours.eager_us, ours.eager_train_us) == (25.0, 25.0)
    assert {(row.layout, row.rows) for row in rows.values()} == {("contiguous", 20)}
    assert ours.hard_data == {"leading zeros": 1.0, "scaled rows": 1.0}
    # Its bytes at the probe's bandwidth, over the time of a call.
    moved = ours.terabytes_per_second["forward"] * 30.0 * 1e6
    assert round(moved) == on_the_cpu.least_bytes("forward")
    assert (rows["absent"].verdict, rows["absent"].reason) == ("not applicable", "not installed")
    assert (rows["broken"].verdict, rows["broken"].reason) == ("failed", "RuntimeError: no kernel")
    assert rows["broken"].forward_us is None


def test_measure_own_backend_that_fails_ends_the_run(on_the_cpu, monkeypatch):
    def failing(*tensors):
        raise RuntimeError("an illegal memory access was encountered")

    broken = [variants.Variant("cuda", "", failing, ours=True)]
    monkeypatch.setattr(measure, "variants", lambda *arguments: broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measure.measure(on_the_cpu)


def test_hard_data_of_upstream_gradients_keep_shape_and_dtype():
    dy = torch.ones(8, 4, dtype=torch.bfloat16)
    assert measure.leading_zeros(dy).sum() == 16
    scaled = measure.scaled_rows(dy)
    assert scaled.dtype == dy.dtype
    # One factor for a row, a power of two.
    assert bool((scaled == scaled[:, :1]).all())
    assert bool((scaled.float().frexp().mantissa == 0.5).all())


def test_variants_without_prior_art_are_ours_and_the_compiled_formula(monkeypatch):
    monkeypatch.setattr(variants, "_ours", lambda operator, name, scalars: name)
    found = variants.variants(DEMO, {}, {})
    assert found[:2] == ["cuda", "triton"]
    assert [v.name for v in found[2:]] == ["torch.compile"]
    assert [peer.name for peer in variants.peers_of(DEMO)] == ["torch.compile"]


def test_peers_that_round_elsewhere_are_named_once_and_not_timed(monkeypatch):
    shared, elsewhere = (variants.Peer(n, "torch", lambda told: None) for n in ("both", "else"))
    art = SimpleNamespace(PEERS=(shared,), CONVENTIONS=(elsewhere, shared))
    monkeypatch.setattr(variants, "prior_art", lambda operator: art)
    monkeypatch.setattr(variants, "_ours", lambda operator, name, scalars: name)
    assert [p.name for p in variants.peers_of(DEMO)] == ["torch.compile", "both", "else"]
    assert [p.name for p in variants.timed_peers(DEMO)] == ["torch.compile", "both"]
    assert [v.name for v in variants.variants(DEMO, {}, {})[2:]] == ["torch.compile", "both"]


def test_compiled_formula_of_a_sum_says_that_it_norms_more_than_was_rounded(monkeypatch):
    outputs = (replace(DEMO.outputs[0], sum_of=("x", "residual")),)
    summed = SimpleNamespace(outputs=outputs, scalars=(), oracle=None)
    monkeypatch.setattr(variants, "prior_art", lambda operator: None)
    assert variants.compiled_peer(summed).name == "torch.compile, sum unrounded"
    art = SimpleNamespace(COMPILED=lambda scalars: None)
    monkeypatch.setattr(variants, "prior_art", lambda operator: art)
    assert variants.compiled_peer(summed).name == "torch.compile"


def test_compiled_peer_is_what_the_folder_would_compile(monkeypatch):
    seen = {}
    art = SimpleNamespace(COMPILED=lambda scalars: lambda x: x * scalars["factor"])
    monkeypatch.setattr(variants, "prior_art", lambda operator: art)
    monkeypatch.setattr(torch, "compile", lambda call, **told: seen.update(told) or call)
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    compiled = variants.compiled_peer(DEMO, dynamic=True).make({"factor": 3.0})
    assert torch.equal(compiled(x), 3 * x)
    assert seen == {"dynamic": True, "fullgraph": True}


def test_variants_that_are_refused_are_not_made_and_say_why(monkeypatch):
    def making(told):
        raise AssertionError("it must not be made")

    own = variants.Peer("cuda, two calls", "torch", making, ours=True)
    other = variants.Peer("other", "torch", making)
    monkeypatch.setattr(variants, "_peers", lambda operator: (own, other))
    refused = {
        "cuda": ("failed", "red"),
        "triton": ("failed", "red"),
        "other": ("other function", ""),
    }
    found = variants.variants(DEMO, {}, {}, {**refused, "torch.compile": ("failed", "")})
    assert all(variant.call is None for variant in found)
    verdicts = {variant.name: (variant.verdict, variant.missing) for variant in found}
    assert verdicts["cuda, two calls"] == verdicts["cuda"] == ("failed", "red")
    assert verdicts["other"] == ("other function", "")


def test_peer_that_is_absent_says_so():
    def importing(scalars):
        raise ImportError("no such module")

    absent = variants.Peer("absent", "no-such-distribution", importing)
    assert variants._peer(absent, {}).missing == "not installed"
    assert absent.missing() == "it needs the package no-such-distribution, which is not installed"
    present = variants.Peer("torch", "torch", lambda scalars: torch.mul)
    assert present.missing() is None
    known = variants._peer(present, {})
    assert (known.call, known.verdict) == (torch.mul, "measured")
    assert known.version.partition("+")[0] == torch.__version__.partition("+")[0]
    broken = variants._peer(variants.Peer("broken", "torch", importing), {})
    assert (broken.verdict, broken.missing) == ("failed", "ImportError: no such module")


def test_peer_of_ours_that_cannot_run_here_says_so():
    def choosing(told):
        raise BackendError("demo: cuda cannot run")

    own = variants.Peer("two calls", "torch", choosing, ours=True)
    found = variants._peer(own, {})
    assert (found.call, found.missing, found.ours) == (None, "demo: cuda cannot run", True)
    assert found.verdict == "not applicable"


def test_peers_are_told_scalars_and_arguments_of_the_workload(monkeypatch):
    told = []

    def making(settings):
        told.append(settings)
        return torch.mul

    peer = variants.Peer("torch", "torch", making)
    monkeypatch.setattr(variants, "_peers", lambda operator: (peer,))
    monkeypatch.setattr(variants, "_ours", lambda operator, name, settings: told.append(settings))
    variants.variants(DEMO, {"scale": 2.0}, {"width": 4})
    assert told == [{"scale": 2.0, "width": 4}] * 3
