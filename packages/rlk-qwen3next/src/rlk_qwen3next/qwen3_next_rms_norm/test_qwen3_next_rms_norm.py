# SPDX-License-Identifier: Apache-2.0
"""What is special to qwen3_next_rms_norm: it is rms_norm with the FP32 weight 1 + w."""

import pytest
import torch

from rlk.compare import assert_same_bits, same_bits
from rlk_qwen3next import Qwen3NextRMSNorm, qwen3_next_rms_norm, rms_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The widths of its sites, and one off every block size.
WIDTHS = (131, 256, 2048)


def inputs(dtype, n, rows=5):
    generator = torch.Generator().manual_seed(n)
    x, dy = (torch.randn(rows, n, generator=generator).to(dtype) for _ in range(2))
    weight = (torch.randn(n, generator=generator) / 8).to(dtype)
    return x, weight, dy


def gradients(function, x, weight, dy, *arguments, **options):
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    y = function(*leaves, *arguments, **options)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_equal_rms_norm_with_an_explicit_fp32_weight(backend, dtype, n):
    x, weight, dy = inputs(dtype, n)
    y, dx, dweight = gradients(qwen3_next_rms_norm, x, weight, dy, backend=backend)
    explicit = gradients(rms_norm, x, 1.0 + weight.float(), dy, backend=backend)
    for name, actual, expected in zip(("y", "dx"), (y, dx), explicit, strict=False):
        assert_same_bits(actual, expected, name)
    # One rounding from the exact sum: FP32 first and then dtype would be two.
    offset = gradients(rms_norm, x, weight, dy, 1e-6, 1.0, backend=backend)
    assert_same_bits(dweight, offset[2], "dweight")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bits_differ_from_a_weight_folded_into_the_narrow_dtype(backend, dtype):
    x, weight, _ = inputs(dtype, 256)
    y = qwen3_next_rms_norm(x, weight, backend=backend)
    assert not same_bits(y, rms_norm(x, 1.0 + weight, backend=backend))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zero_weight_gives_the_bare_normalised_rows(backend, dtype, zero):
    x, _, _ = inputs(dtype, 131)
    y = qwen3_next_rms_norm(x, torch.full((131,), zero, dtype=dtype), backend=backend)
    _, rstd = torch.ops.rlk.qwen3_next_rms_norm(x, torch.zeros(131), 1e-6, 1.0, "ieee", backend)
    assert_same_bits(y, (x.float() * rstd[:, None]).to(dtype), "y")


def test_module_new_weight_is_zero_and_normalises(backend):
    module = Qwen3NextRMSNorm(4, eps=0.0)
    assert_same_bits(module.weight.detach(), torch.zeros(4), "weight")
    y = qwen3_next_rms_norm(torch.full((2, 4), 3.0), module.weight, 0.0, backend=backend)
    assert_same_bits(y.detach(), torch.ones(2, 4), "y")
