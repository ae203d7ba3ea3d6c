# SPDX-License-Identifier: Apache-2.0
"""What is counted and reported; and the whole run with a clock that stands in for a GPU's."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlk.bench import __main__ as command
from rlk.bench import bandwidth, measure, report, variants
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
    assert work.streams("forward") == work.streams("backward") == (1, 1)


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


class EagerCapture:
    """Runs the step once for each set; a call takes as long as its name."""

    def __init__(self, step, sets, floor_us, stream):
        self.results = [step(i) for i in range(sets)]

    def replay_us(self):
        return 10.0


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Everything but the clock and the memory counter, on the CPU."""
    monkeypatch.setattr(measure, "DEVICE", "cpu")
    monkeypatch.setattr(measure, "Capture", EagerCapture)
    monkeypatch.setattr(measure, "interleaved", lambda found: dict.fromkeys(found, Time(30.0, 1.0)))
    monkeypatch.setattr(measure, "extra_bytes", lambda call: (call(), 2**21)[1])
    monkeypatch.setattr(measure, "host_us", lambda call: (call(), 20.0)[1])
    monkeypatch.setattr(measure, "eager_us", lambda step, sets: (step(sets - 1), 25.0)[1])
    floor = bandwidth.Floor(Time(10.0, 0.5), WORK.least_bytes("forward"), "unroll 4, tiled")
    monkeypatch.setattr(bandwidth, "floor", lambda work, direction, stream: floor)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.enable_grad())
    few = Work(DEMO, "somewhere", {"T": 20, "N": 128}, torch.bfloat16)
    monkeypatch.setattr(Work, "sets", 2)

    def product(x, gate, weight):
        return x * gate * weight

    def failing(x, gate, weight):
        raise RuntimeError("no kernel\nfor this")

    taking_part = [
        variants.Variant("cuda", "", product, ours=True),
        variants.Variant("torch.compile", "2", product),
        variants.Variant("absent", "", None, "not installed"),
        variants.Variant("broken", "1", failing),
    ]
    monkeypatch.setattr(measure, "variants", lambda operator, scalars, arguments: taking_part)
    return few


def test_measure_every_variant_gets_a_row_beside_the_floor(on_the_cpu):
    rows = {row["variant"]: row for row in measure.measure(on_the_cpu)}
    assert list(rows) == ["floor", "cuda", "torch.compile", "absent", "broken"]
    ours = rows["cuda"]
    assert (ours["forward_us"], ours["both_us"], ours["peer_ratio"]) == (30.0, 60.0, 1.0)
    assert ours["extra_mib"] == 2.0
    assert (ours["host_us"], ours["eager_us"], ours["eager_train_us"]) == (20.0, 25.0, 25.0)
    assert {row["layout"] for row in rows.values()} == {"contiguous"}
    assert ours["hard_data"] == {"leading zeros": 1.0, "scaled rows": 1.0}
    assert rows["absent"]["missing"] == "not installed"
    assert rows["broken"]["missing"] == "RuntimeError: no kernel"
    assert "forward_us" not in rows["broken"]


def test_measure_own_backend_that_fails_ends_the_run(on_the_cpu, monkeypatch):
    def failing(*tensors):
        raise RuntimeError("an illegal memory access was encountered")

    broken = [variants.Variant("cuda", "", failing, ours=True)]
    monkeypatch.setattr(measure, "variants", lambda operator, scalars, arguments: broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measure.measure(on_the_cpu)


def test_report_of_a_run_names_its_environment_and_keeps_its_rows(on_the_cpu, tmp_path):
    rows = measure.measure(on_the_cpu)
    text = report.table(rows)
    assert "demo 20x128 bfloat16 contiguous" in text
    assert "not installed" in text
    report.write(tmp_path / "bench.json", rows)
    document = json.loads((tmp_path / "bench.json").read_text())
    assert document["schema"] == report.SCHEMA
    assert {"commit", "dirty", "device", "driver", "torch", "triton"} <= document.keys()
    assert [row["variant"] for row in document["rows"]] == [row["variant"] for row in rows]


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
    monkeypatch.setattr(variants, "_compiled", lambda operator, scalars: None)
    found = variants.variants(DEMO, {}, {})
    assert found[:2] == ["cuda", "triton"]
    assert [v.name for v in found[2:]] == ["torch.compile"]


def test_peer_that_is_absent_says_so():
    def importing(scalars):
        raise ImportError("no such module")

    absent = variants.Peer("absent", "no-such-distribution", importing)
    assert variants.peer_variant(absent, {}).missing == "not installed"
    present = variants.Peer("torch", "torch", lambda scalars: torch.mul)
    assert variants.peer_variant(present, {}) == variants.Variant(
        "torch", torch.__version__, torch.mul
    )


def test_peer_of_ours_that_cannot_run_here_says_so():
    def choosing(told):
        raise BackendError("demo: cuda cannot run")

    own = variants.Peer("two calls", "torch", choosing, ours=True)
    assert variants.peer_variant(own, {}) == variants.Variant(
        "two calls", "", None, "demo: cuda cannot run", ours=True
    )


def test_peers_are_told_scalars_and_arguments_of_the_workload(monkeypatch):
    told = []

    def making(settings):
        told.append(settings)
        return torch.mul

    peer = variants.Peer("torch", "torch", making)
    art = SimpleNamespace(PEERS=(peer,))
    monkeypatch.setattr(variants, "prior_art", lambda operator: art)
    monkeypatch.setattr(variants, "_ours", lambda operator, name, settings: told.append(settings))
    monkeypatch.setattr(variants, "_compiled", lambda operator, scalars: told.append(scalars))
    variants.variants(DEMO, {"scale": 2.0}, {"width": 4})
    everything = {"scale": 2.0, "width": 4}
    assert told == [everything, everything, {"scale": 2.0}, everything]


def test_command_without_a_gpu_exits_with_2(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--all"]) == 2
    assert "must have an NVIDIA GPU" in capsys.readouterr().err


def test_command_measures_the_layouts_it_is_given(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command.select, "named", lambda names: [HEADS])
    measured = []
    monkeypatch.setattr(command, "measure", lambda work: measured.append(work.layout) or [])
    assert command.main(["heads", "--layout", "packed", "--rows", "8"]) == 0
    assert command.main(["heads"]) == 0
    assert measured == ["packed", "packed", "packed", "contiguous"]


def test_command_that_is_interrupted_keeps_the_sizes_it_has(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command.select, "named", lambda names: [HEADS])
    found = iter([[{"variant": "first"}], KeyboardInterrupt()])

    def measured(work):
        result = next(found)
        if isinstance(result, BaseException):
            raise result
        return result

    monkeypatch.setattr(command, "measure", measured)
    monkeypatch.setattr(command.report, "table", lambda rows: "")
    monkeypatch.setattr(command.report, "document", lambda rows: {"schema": "", "rows": rows})
    with pytest.raises(KeyboardInterrupt):
        command.main(["heads", "--json", str(tmp_path / "bench.json")])
    assert json.loads((tmp_path / "bench.json").read_text())["rows"] == [{"variant": "first"}]
