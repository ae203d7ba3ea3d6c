# SPDX-License-Identifier: Apache-2.0
"""What is special to rms_norm: the offset, the sign of zero weights, FP32 weights."""

import pytest
import torch

from rlk import trace
from rlk.compare import assert_same_bits
from rlk_qwen3next import RMSNorm, rms_norm


def test_y_rows_of_ones_is_the_weight(backend):
    weight = torch.linspace(-1, 1, 257)
    y = rms_norm(torch.ones(3, 257), weight, 0.0, backend=backend)
    assert_same_bits(y, weight.expand(3, 257).contiguous(), "y")


def test_y_offset_is_added_to_a_narrow_weight_in_fp32(backend):
    # BF16 cannot hold the offset, and would give a weight of 0.
    x, weight = torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16)
    y = rms_norm(x, weight, 0.0, -(1 - 2.0**-20), backend=backend)
    assert_same_bits(y, torch.full_like(x, 2.0**-20), "y")


@pytest.mark.parametrize("offset", [0.0, -0.0, 1e-60])
def test_y_negative_zero_weight_keeps_its_sign_without_offset(backend, offset):
    # 1e-60 is 0 in FP32, the dtype of the offset.
    x = torch.tensor([[1.0, -2.0, 3.0, -4.0]])
    y = rms_norm(x, torch.full((4,), -0.0), 1e-6, offset, backend=backend)
    assert torch.signbit(y).tolist() == [[True, False, True, False]]
    assert y.count_nonzero() == 0


def test_y_negative_zero_weight_with_offset_is_the_offset(backend):
    x = torch.randn(3, 129)
    y = rms_norm(x, torch.full((129,), -0.0), 1e-6, 1.0, backend=backend)
    assert_same_bits(y, rms_norm(x, torch.ones(129), backend=backend), "y")


def test_dx_rows_of_ones_has_no_component_along_the_row(backend):
    # y does not change along x: dx = rstd * (dy - mean(dy)) for rows of ones.
    x = torch.ones(1, 4, requires_grad=True)
    dy = torch.tensor([[4.0, 0.0, -4.0, 8.0]])
    y = rms_norm(x, torch.ones(4), 0.0, backend=backend)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert_same_bits(dx, torch.tensor([[2.0, -2.0, -6.0, 6.0]]), "dx")


def test_dweight_has_no_offset_term(backend):
    x = torch.randn(7, 129)
    dweight = []
    for offset in (0.0, 1.0):
        weight = torch.randn(129, requires_grad=True)
        rms_norm(x, weight, 1e-6, offset, backend=backend).sum().backward()
        dweight.append(weight.grad)
    assert_same_bits(dweight[1], dweight[0], "dweight")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_weight_with_narrow_rows_is_not_rounded(backend, dtype):
    # 1 + 2^-12 is 1 in BF16 and FP16; times 2^12 - 1 it is 2^12 to both.
    weight = torch.full((4,), 1 + 2.0**-12, requires_grad=True)
    x = torch.ones(2, 4, dtype=dtype, requires_grad=True)
    y = rms_norm(x, weight, 0.0, -1.0, backend=backend)
    assert_same_bits(y, torch.full((2, 4), 2.0**-12, dtype=dtype), "y")
    # 1 and 2^-12: their sum needs FP32.
    dy = torch.tensor([[1.0], [2.0**-12]], dtype=dtype).expand(2, 4)
    dx, dweight = torch.autograd.grad(y, [x, weight], dy)
    assert dx.dtype == dtype
    assert_same_bits(dweight, torch.full((4,), 1 + 2.0**-12), "dweight")


def test_module_initial_weight_gives_the_bare_normalised_rows(backend):
    x = torch.full((2, 4), 3.0)
    y = rms_norm(x, RMSNorm(4).weight, 0.0, backend=backend)
    assert_same_bits(y.detach(), torch.ones(2, 4), "y")


def test_empty_batch_launches_nothing(backend):
    x, weight = torch.ones(0, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    with trace() as launches:
        dx, dweight = torch.autograd.grad(rms_norm(x, weight, backend=backend).sum(), [x, weight])
    assert launches == []
    assert dx.shape == (0, 4)
    assert_same_bits(dweight, torch.zeros(4), "dweight")
