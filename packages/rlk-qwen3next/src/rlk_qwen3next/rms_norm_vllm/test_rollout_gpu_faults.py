# SPDX-License-Identifier: Apache-2.0
"""Faults planted into kernels that have the engine's bits: rollout_equal must be red on a GPU."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from rlk import backends
from rlk.gates import cases, judge
from rlk_qwen3next.rms_norm.operator import OPERATOR as RMS_NORM
from rlk_qwen3next.rms_norm_residual.operator import OPERATOR as RMS_NORM_RESIDUAL
from rlk_qwen3next.rms_norm_residual_vllm import rollout as residual_rollout
from rlk_qwen3next.rms_norm_residual_vllm.operator import OPERATOR as RESIDUAL
from rlk_qwen3next.rms_norm_vllm import rollout
from rlk_qwen3next.rms_norm_vllm.operator import OPERATOR
from rlk_qwen3next.rms_norm_vllm.test_rms_norm_vllm import ROWS, WIDTHS, all_of, engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.parametrize("backend", ["cuda", "triton"]),
]

EVERY = list(product(ROWS, WIDTHS))
# Where elements lie so near to a middle of BF16 that the two roots round them apart: a CPU has IEEE
# arithmetic too, and found these sizes.
APART = {(4097, n) for n in WIDTHS} | {(m, n) for m in (255, 256, 257) for n in (1024, 2048)}
RESIDUAL_APART = APART | {(64, 2048)}
# 8 million elements: another order of the sum shows in tens of them.
MANY = [(4097, 2048)]
PLAIN = (OPERATOR, rollout)
SUM = (RESIDUAL, residual_rollout)


def verdicts(operator, backend, module):
    """Whether each record of the gate passed, by tensor and sizes, with `module` as a backend."""
    row = getattr(backends, backend)(lambda: module)
    planted = replace(operator, backends=(row,))
    (case,) = cases([planted], identity=f"{operator.name}/{backend}/rollout_equal/bfloat16")
    return {(r.tensor, r.config): r.status for r in judge(case)}


def kernels(operator, backend):
    """The module of a declared backend."""
    return operator.backend(backend).load()


def with_forward(forward):
    """A backend of a forward alone, which is all that the judgment runs."""
    return SimpleNamespace(forward=forward, backward=None)


def in_another_order(module):
    """The forward of a module with the columns of a row summed in another order."""

    def forward(*tensors, **scalars):
        n = tensors[0].shape[1]
        order = torch.randperm(n, generator=torch.Generator().manual_seed(n)).to(tensors[0].device)
        *outputs, rstd = module.forward(*(t[..., order] for t in tensors), **scalars)
        return *(t[:, order.argsort()].contiguous() for t in outputs), rstd

    return with_forward(forward)


def of_the_unrounded_sum(module):
    """A residual form that norms what FP32 has of the sum, with the kernels of the plain form."""

    def forward(x, residual, weight, **scalars):
        total = x.float() + residual.float()
        y, rstd = module.forward(total, weight.float(), **scalars)
        return y.to(x.dtype), total.to(x.dtype), rstd

    return with_forward(forward)


def test_gate_kernels_as_they_are_stay_green_where_faults_are_red(backend, monkeypatch):
    for operator, module in (PLAIN, SUM):
        engine(module, monkeypatch, [(64, 2048), *MANY])
        found = verdicts(operator, backend, with_forward(kernels(operator, backend).forward))
        names = operator.claimed("rollout_equal")
        assert found == all_of(names, [(64, 2048), *MANY], "passed")


def test_gate_planted_ieee_root_is_red_exactly_where_a_cpu_rounds_apart(backend):
    alike = set(EVERY) - APART
    found = verdicts(OPERATOR, backend, kernels(RMS_NORM, backend))
    assert found == all_of(["y"], APART, "failed") | all_of(["y"], alike, "passed")
    alike = set(EVERY) - RESIDUAL_APART
    found = verdicts(RESIDUAL, backend, kernels(RMS_NORM_RESIDUAL, backend))
    expected = all_of(["y"], RESIDUAL_APART, "failed") | all_of(["y"], alike, "passed")
    assert found == expected | all_of(["residual_out"], EVERY, "passed")


def test_gate_planted_tree_order_is_red_and_its_sum_is_not(backend, monkeypatch):
    engine(rollout, monkeypatch, MANY)
    engine(residual_rollout, monkeypatch, MANY)
    found = verdicts(OPERATOR, backend, in_another_order(kernels(OPERATOR, backend)))
    assert found == all_of(["y"], MANY, "failed")
    found = verdicts(RESIDUAL, backend, in_another_order(kernels(RESIDUAL, backend)))
    expected = all_of(["y"], MANY, "failed")
    assert found == expected | all_of(["residual_out"], MANY, "passed")


def test_gate_planted_sum_not_rounded_before_the_norm_is_red(backend, monkeypatch):
    sizes = [(1, 128), (7, 256), (64, 2048)]
    engine(residual_rollout, monkeypatch, sizes)
    found = verdicts(RESIDUAL, backend, of_the_unrounded_sum(kernels(OPERATOR, backend)))
    assert found == all_of(["y"], sizes, "failed") | all_of(["residual_out"], sizes, "passed")
