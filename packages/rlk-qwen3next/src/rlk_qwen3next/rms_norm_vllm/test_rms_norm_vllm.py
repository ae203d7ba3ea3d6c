# SPDX-License-Identifier: Apache-2.0
"""What is special to rms_norm_vllm and its residual form: an engine's bits, on what has them."""

from dataclasses import replace
from itertools import product

import pytest
import torch

import rlk_qwen3next
from rlk import backends, dispatch
from rlk.compare import assert_same_bits
from rlk.errors import ArgumentError, BackendError, PlatformError
from rlk.gates import cases, judge
from rlk.gates.rollout_equal import digest
from rlk.test_support.sabotage import rebound
from rlk_qwen3next import RMSNorm, rms_norm
from rlk_qwen3next.rms_norm import golden as norm
from rlk_qwen3next.rms_norm_residual import golden as with_residual
from rlk_qwen3next.rms_norm_residual_vllm import rollout as residual_rollout
from rlk_qwen3next.rms_norm_residual_vllm.operator import OPERATOR as RESIDUAL
from rlk_qwen3next.rms_norm_vllm import rollout
from rlk_qwen3next.rms_norm_vllm.operator import OPERATOR

ROWS = (1, 7, 64, 255, 256, 257, 4097)
WIDTHS = (128, 256, 512, 1024, 2048)
# Here no element stands so near to a middle of BF16 that the two roots round it apart: IEEE
# arithmetic, which the CPU has, must give the engine's bytes. Beyond, some elements differ.
ALIKE = [(rows, n) for rows, n in product((1, 7, 64, 257), (128, 256, 512))]
APART = [(257, 2048)]


def fold(a, b):
    """Products added one after another, in place of a tree."""
    total = torch.zeros_like(a[:, 0])
    for left, right in zip(a.unbind(1), b.unbind(1), strict=True):
        total = total + left * right
    return total


def engine(module, monkeypatch, sizes, **fields):
    """The engine of a rollout module with some of its recorded inputs."""
    wanted = [{"T": rows, "N": n} for rows, n in sizes]
    kept = tuple(r for r in module.ENGINE.recorded if r.sizes in wanted)
    assert len(kept) == len(wanted)
    monkeypatch.setattr(module, "ENGINE", replace(module.ENGINE, recorded=kept, **fields))


def ieee(module, root=None, row_dot=None):
    """A golden module as it is, or with another reciprocal root or order."""
    steps = {} if row_dot is None else {"row_dot": row_dot}
    changed = rebound(norm, **steps)
    if root is not None:
        changed = rebound(norm, inverse_rms=root)
    return changed if module is norm else rebound(with_residual, plain=changed)


def verdicts(operator, module, **steps):
    """Whether each record of the gate passed, by tensor and sizes, on a CPU with golden's code."""
    planted = replace(operator, backends=(backends.golden(lambda: ieee(module, **steps)),))
    (case,) = cases([planted], identity=f"{operator.name}/golden/rollout_equal/bfloat16")
    return {(r.tensor, r.config): r.status for r in judge(case)}


def all_of(names, sizes, status):
    return {(name, f"T={rows}_N={n}"): status for name in names for rows, n in sizes}


def test_recorded_digests_cover_every_width_and_row_count_with_their_source():
    assert "0.33.0" in rollout._DOCUMENT["source"]
    for module, names in ((rollout, {"y"}), (residual_rollout, {"y", "residual_out"})):
        found = [(r.sizes["T"], r.sizes["N"]) for r in module.ENGINE.recorded]
        assert sorted(found) == sorted(product(ROWS, WIDTHS))
        assert all(set(r.digests) == names for r in module.ENGINE.recorded)


def test_recorded_sums_of_every_size_are_those_of_the_cpu():
    # One IEEE addition and one rounding: the engine's residual needs no GPU to be witnessed.
    for recorded in residual_rollout.ENGINE.recorded:
        if recorded.sizes["T"] <= 257:
            made = rollout.tensors(recorded.sizes)
            total = with_residual.rounded_sum(made["x"], made["residual"])
            assert digest(total) == recorded.digests["residual_out"], recorded.sizes


def test_gate_where_roots_round_alike_is_green_in_the_written_order(monkeypatch):
    engine(rollout, monkeypatch, ALIKE)
    engine(residual_rollout, monkeypatch, ALIKE)
    assert verdicts(OPERATOR, norm) == all_of("y", ALIKE, "passed")
    names = ("y", "residual_out")
    assert verdicts(RESIDUAL, with_residual) == all_of(names, ALIKE, "passed")


def test_gate_planted_ieee_root_is_red_and_its_sum_is_not(monkeypatch):
    engine(rollout, monkeypatch, APART)
    engine(residual_rollout, monkeypatch, APART)
    assert verdicts(OPERATOR, norm) == all_of("y", APART, "failed")
    expected = all_of(["y"], APART, "failed") | all_of(["residual_out"], APART, "passed")
    assert verdicts(RESIDUAL, with_residual) == expected


def test_gate_root_rounded_correctly_on_a_cpu_is_red_and_not_claimed(monkeypatch):
    # The instruction is no rounding of the exact root: nothing computed without it is the engine's.
    def nearest(x, eps):
        square = norm.divide(norm.row_dot(x, x), torch.full_like(x[:, 0], x.shape[1]))
        return (square + torch.full_like(square, eps)).double().pow(-0.5).float()

    engine(rollout, monkeypatch, APART)
    assert verdicts(OPERATOR, norm, root=nearest) == all_of("y", APART, "failed")
    assert {p for b in OPERATOR.backends for p in b.platforms + b.on_request} == {"nvidia"}
    assert OPERATOR.claimed("gpu_to_gpu") == ()


def test_gate_planted_tree_order_is_red(monkeypatch):
    # Sizes that are green in the written order; a fold has the larger error, so more shows.
    sizes = [(255, 512), (256, 512), (257, 512)]
    engine(rollout, monkeypatch, sizes)
    assert verdicts(OPERATOR, norm) == all_of("y", sizes, "passed")
    assert "failed" in verdicts(OPERATOR, norm, row_dot=fold).values()


def test_gate_planted_sum_not_rounded_before_the_norm_is_red(monkeypatch):
    def forward(x, residual, weight, **scalars):
        _, residual_out, _ = with_residual.forward(x, residual, weight, **scalars)
        total = x.float() + residual.float()
        y, rstd = norm.normalise(total, weight, scalars["eps"], scalars["weight_offset"])
        return y.to(x.dtype), residual_out, rstd

    sizes = [(7, 128), (64, 256)]
    engine(residual_rollout, monkeypatch, sizes)
    module = rebound(with_residual, forward=forward)
    planted = replace(RESIDUAL, backends=(backends.golden(lambda: module),))
    (case,) = cases([planted], identity=f"{RESIDUAL.name}/golden/rollout_equal/bfloat16")
    found = {(r.tensor, r.config): r.status for r in judge(case)}
    assert found == all_of(["y"], sizes, "failed") | all_of(["residual_out"], sizes, "passed")


@pytest.mark.parametrize(("wrong", "status"), [(False, "passed"), (True, "failed")])
def test_gate_installed_engine_is_compared_live_and_named(monkeypatch, wrong, status):
    def call(x, weight):
        y, _ = norm.normalise(x, weight, 1e-6, 0.0)
        return (y.roll(1, 0) if wrong else y,)

    engine(rollout, monkeypatch, [(7, 128)], load=lambda: ("9.9", call))
    planted = replace(OPERATOR, backends=(backends.golden(lambda: norm),))
    (case,) = cases([planted], identity=f"{OPERATOR.name}/golden/rollout_equal/bfloat16")
    (record,) = judge(case)
    assert (record.status, record.config_pair) == (status, "vLLM 9.9, live")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("operator", [OPERATOR, RESIDUAL], ids=lambda o: o.name)
def test_gate_without_a_gpu_is_not_run_with_the_reason(operator):
    for case in cases([operator]):
        (record,) = judge(case)
        assert record.status == "not_run"
        assert "must be an NVIDIA GPU, got cpu" in record.reason or "needs an NVIDIA GPU" in (
            record.reason
        )


@pytest.mark.parametrize("residual", [False, True])
def test_rounding_vllm_on_the_cpu_is_refused_in_one_sentence(residual):
    x, weight = torch.ones(2, 4), torch.ones(4)
    options = {"residual": x} if residual else {}
    name = "rms_norm_residual_vllm" if residual else "rms_norm_vllm"
    for backend in (None, "triton", "golden"):
        with pytest.raises(PlatformError) as caught:
            rms_norm(x, weight, rounding="vllm", backend=backend, **options)
        assert str(caught.value) == (
            f"{name}: the device must be an NVIDIA GPU, got cpu; use rms_norm with rounding='ieee'"
        )


def test_rounding_vllm_on_rocm_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(PlatformError, match="must be an NVIDIA GPU, got rocm; no backend"):
        dispatch.choose(OPERATOR, torch.device("cuda"), "auto")


def test_backend_golden_on_a_gpu_has_no_such_bits(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    device = torch.device("cuda")
    with pytest.raises(BackendError, match="backend must be one of 'auto', 'cuda', 'triton', got"):
        dispatch.choose(OPERATOR, device, "golden")


def test_module_rounding_is_checked_shown_and_used():
    with pytest.raises(ArgumentError, match="rounding must be one of ieee, vllm, got 'up'"):
        RMSNorm(4, rounding="up")
    module = RMSNorm(4, rounding="vllm")
    assert repr(module) == "RMSNorm((4,), eps=1e-06, rounding='vllm')"
    with pytest.raises(PlatformError, match="^rms_norm_vllm: "):
        module(torch.ones(2, 4))


def test_modules_pickled_before_there_was_a_rounding_go_on_as_before():
    module = RMSNorm(4)
    del module.__dict__["rounding"]
    x = torch.randn(2, 4)
    assert_same_bits(module(x).detach(), rms_norm(x, module.weight).detach(), "y")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_roundings_differ_in_a_few_elements_per_million(backend):
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(4096, 2048, generator=generator, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(2048, device="cuda", dtype=torch.bfloat16)
    y, other = (rms_norm(x, weight, rounding=r, backend=backend) for r in ("ieee", "vllm"))
    assert 0 < int((y != other).sum()) < x.numel() // 10_000
    assert rlk_qwen3next.rms_norm_vllm(x, weight, backend=backend).equal(other)
