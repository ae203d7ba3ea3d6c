# SPDX-License-Identifier: Apache-2.0
"""The modules in a block of exact gradients: micro-batches have the bits of the whole batch."""

import copy

import pytest
import torch
from torch import nn

from rlk import use_backend
from rlk.compare import assert_same_bits, same_bits
from rlk.exact_grad import ExactGradAccumulator, new_carrier, state_of
from rlk.reduce import exact_sum
from rlk_qwen3next import (
    Qwen3NextRMSNorm,
    Qwen3NextRMSNormGated,
    RMSNorm,
    qwen3_next_rms_norm,
    rms_norm,
    rms_norm_gated,
)

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GPU_BACKENDS = [pytest.param(name, marks=GPU) for name in ("cuda", "triton")]
WIDTH, ROWS = 96, 22
PIECES = ((0, 1), (1, 9), (9, 10), (10, 22))


def rows(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator).to(dtype)


def inputs(module, dtype):
    gated = isinstance(module, Qwen3NextRMSNormGated)
    made = [rows(1, dtype), rows(2, dtype)] if gated else [rows(1, dtype)]
    return [t.to(module.weight.device) for t in made]


def weight_gradient(module, pieces, dtype):
    module.zero_grad()
    dy = rows(3, dtype).to(module.weight.device)
    for start, stop in pieces:
        module(*(t[start:stop] for t in inputs(module, dtype))).backward(dy[start:stop])
    return module.weight.grad


@pytest.mark.parametrize("backend", ["golden", *GPU_BACKENDS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("build", [RMSNorm, Qwen3NextRMSNorm, Qwen3NextRMSNormGated])
def test_module_in_micro_batches_has_the_weight_gradient_of_the_whole(build, dtype, backend):
    module = build(WIDTH).to("cpu" if backend == "golden" else "cuda", dtype)
    with use_backend(backend):
        in_micro_batches(module, dtype)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_module_of_an_engines_rounding_adds_micro_batches_exactly_too(backend):
    with use_backend(backend):
        in_micro_batches(RMSNorm(WIDTH, rounding="vllm").cuda(), torch.float32)


def in_micro_batches(module, dtype):
    expected = weight_gradient(module, [(0, ROWS)], dtype).clone()
    plain = weight_gradient(copy.deepcopy(module), PIECES, dtype)
    assert not same_bits(plain, expected)
    sums = ExactGradAccumulator(nn.Sequential(module))
    assert sums.report().exact == ("0.weight",)
    module.zero_grad()
    with sums:
        weight_gradient(module, PIECES, dtype)
    assert_same_bits(module.weight.grad, expected, "dweight")


CALLS = {
    "rms_norm": lambda x, gate, weight, carrier: rms_norm(x, weight, weight_sum=carrier),
    "qwen3_next_rms_norm": lambda x, gate, weight, carrier: qwen3_next_rms_norm(
        x, weight, weight_sum=carrier
    ),
    "rms_norm_gated": lambda x, gate, weight, carrier: rms_norm_gated(
        x, gate, weight, weight_sum=carrier
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_function_with_a_carrier_leaves_the_weight_gradient_unrounded(name):
    x, gate, dy = rows(1), rows(2), rows(3)
    weight = torch.ones(WIDTH, requires_grad=True)
    (expected,) = torch.autograd.grad(CALLS[name](x, gate, weight, None), weight, dy)
    carrier = new_carrier(weight)
    for start, stop in PIECES:
        y = CALLS[name](x[start:stop], gate[start:stop], weight, carrier)
        y.backward(dy[start:stop])
    assert_same_bits(exact_sum.round(state_of(carrier), torch.float32), expected, "dweight")
    assert_same_bits(weight.grad, torch.zeros(WIDTH), "weight.grad")
