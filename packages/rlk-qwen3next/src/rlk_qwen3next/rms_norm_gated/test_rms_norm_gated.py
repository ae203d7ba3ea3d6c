# SPDX-License-Identifier: Apache-2.0
"""What is special to rms_norm_gated: the gate, its activations, and where others round."""

import math

import pytest
import torch

from rlk import contract
from rlk.compare import assert_same_bits, raw_bits
from rlk.errors import ArgumentError
from rlk_qwen3next import Qwen3NextRMSNormGated, rms_norm_gated


def gradients(x, gate, weight, dy, **options):
    leaves = [t.detach().requires_grad_() for t in (x, gate, weight)]
    y = rms_norm_gated(*leaves, **options)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def test_swish_is_silu_in_every_bit(backend, dtype):
    dtype = getattr(torch, dtype)
    x, gate, dy = torch.randn(3, 7, 129).to(dtype)
    weight = torch.randn(129).to(dtype)
    silu = gradients(x, gate, weight, dy, activation="silu", backend=backend)
    swish = gradients(x, gate, weight, dy, activation="swish", backend=backend)
    for name, a, b in zip(("y", "dx", "dgate", "dweight"), swish, silu, strict=True):
        assert_same_bits(a, b, name)


def test_sigmoid_large_gates_pass_or_block(backend):
    # exp(-64) vanishes beside 1 in FP32; exp(100) overflows, and 1 / (1 + Inf) is 0.
    gate = torch.tensor([[64.0, 0.0, -100.0, math.inf, -math.inf]])
    options = {"eps": 0.0, "activation": "sigmoid", "backend": backend}
    y = rms_norm_gated(torch.ones(1, 5), gate, torch.ones(5), **options)
    assert_same_bits(y, torch.tensor([[1.0, 0.5, 0.0, 1.0, 0.0]]), "y")


def test_silu_large_gates_pass_or_vanish_as_in_torch(backend):
    gate = torch.tensor([[64.0, 0.0, -0.0, -100.0, math.inf, -math.inf, math.nan]])
    options = {"eps": 0.0, "backend": backend}
    y = rms_norm_gated(torch.ones(1, 7), gate, torch.ones(7), **options)
    expected = torch.tensor([[64.0, 0.0, -0.0, -0.0, math.inf, math.nan, math.nan]])
    assert_same_bits(y, expected, "y")
    assert_same_bits(torch.nn.functional.silu(gate), expected, "silu of torch")


def test_gradients_open_gates_are_those_of_the_bare_norm(backend):
    # A gate of 64 under sigmoid is a factor of exactly 1 with derivative exactly 0.
    x, dy = torch.randn(2, 7, 129)
    weight = torch.randn(129)
    options = {"activation": "sigmoid", "backend": backend}
    y, dx, dgate, dweight = gradients(x, torch.full((7, 129), 64.0), weight, dy, **options)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    bare, _ = torch.ops.rlk.rms_norm(*leaves, 1e-6, 0.0, "ieee", backend)
    expected = torch.autograd.grad(bare, leaves, dy)
    assert_same_bits(y, bare.detach(), "y")
    assert_same_bits(dx, expected[0], "dx")
    assert_same_bits(dweight, expected[1], "dweight")
    assert dgate.count_nonzero() == 0


def test_dgate_zero_gates_is_half_of_the_ungated_product(backend):
    # silu'(0) = 1/2: with x of ones and eps 0, dgate is dy * weight / 2, exactly.
    dy, weight = torch.randn(3, 129), torch.randn(129)
    x, gate = torch.ones(3, 129), torch.zeros(3, 129)
    _, _, dgate, _ = gradients(x, gate, weight, dy, eps=0.0, backend=backend)
    assert_same_bits(dgate, dy * weight * torch.full_like(dy, 0.5), "dgate")


@pytest.mark.parametrize("size", [8, 128, 129, 2048, 4097])
def test_dweight_rows_of_any_scale_equal_golden(backend, size):
    # From rows whose terms vanish to such whose terms overflow, and rows of zeros.
    generator = torch.Generator().manual_seed(size)
    x, gate, dy = torch.randn(3, 20, size, generator=generator)
    dy *= torch.tensor([2.0**k for k in range(-144, 128, 15)] + [0.0])[:, None]
    gate[2], gate[5, ::3] = -88.0, 100.0
    weight = torch.ones(size)
    actual = gradients(x, gate, weight, dy, backend=backend)
    expected = gradients(x, gate, weight, dy, backend="golden")
    for name, a, b in zip(("y", "dx", "dgate", "dweight"), actual, expected, strict=True):
        assert_same_bits(a, b, name)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_negative_zero_weight_keeps_its_sign_in_y_and_dgate(backend, activation):
    # Gates in (-1, 1), where silu has the sign of its argument and both derivatives are positive.
    generator = torch.Generator().manual_seed(3)
    x, gate, dy = torch.rand(3, 5, 129, generator=generator) * 2 - 1
    options = {"activation": activation, "backend": backend}
    y, _, dgate, _ = gradients(x, gate, torch.full((129,), -0.0), dy, **options)
    assert y.count_nonzero() + dgate.count_nonzero() == 0
    act = gate if activation == "silu" else torch.ones_like(gate)
    assert torch.equal(torch.signbit(y), ~torch.signbit(x * act))
    assert torch.equal(torch.signbit(dgate), ~torch.signbit(dy * x))


def test_negative_zero_weight_with_offset_is_the_offset(backend):
    x, gate, dy = torch.randn(3, 5, 129)
    actual = gradients(x, gate, torch.full((129,), -0.0), dy, weight_offset=1.0, backend=backend)
    expected = gradients(x, gate, torch.ones(129), dy, backend=backend)
    for name, a, b in zip(("y", "dx", "dgate", "dweight"), actual, expected, strict=True):
        assert_same_bits(a, b, name)


def correctly_rounded(y, exact):
    """The fraction of elements equal to the rounded FP64 value."""
    return (raw_bits(y) == raw_bits(exact.to(y.dtype))).double().mean().item()


def test_y_in_bf16_is_correctly_rounded_where_early_casts_are_not(backend):
    generator = torch.Generator().manual_seed(2026)
    x, gate = torch.randn(2, 64, 128, generator=generator).bfloat16()
    weight = (torch.randn(128, generator=generator) / 2 + 1).bfloat16()
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    exact = exact * weight.double() * torch.nn.functional.silu(gate.double())
    bound = contract.load().accuracy("forward_accuracy", "reduction", "bfloat16")
    y = rms_norm_gated(x, gate, weight, backend=backend)
    assert correctly_rounded(y, exact) >= bound.correctly_rounded
    # The other convention: the normalised rows and their product with the weight are BF16.
    rows = x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    early = weight * rows.bfloat16() * torch.nn.functional.silu(gate.float())
    assert correctly_rounded(early.bfloat16(), exact) < bound.correctly_rounded


def test_module_unknown_activation_is_refused_before_anything_is_built():
    message = "rms_norm_gated: activation must be one of silu, sigmoid, swish, got 'gelu'"
    with pytest.raises(ArgumentError) as caught:
        Qwen3NextRMSNormGated(8, activation="gelu", device="no device")
    assert str(caught.value) == message


def test_module_swish_gives_the_bits_of_silu():
    x, gate = torch.randn(2, 3, 8)
    swish, silu = (Qwen3NextRMSNormGated(8, activation=a) for a in ("swish", "silu"))
    assert_same_bits(swish(x, gate).detach(), silu(x, gate).detach(), "y")
