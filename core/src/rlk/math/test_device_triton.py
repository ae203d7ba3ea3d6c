# SPDX-License-Identifier: Apache-2.0
"""The Triton functions give the bytes of golden."""

import pytest
import torch

from rlk import interpreter
from rlk.compare import assert_same_bits
from rlk.math import golden, hard_cases

triton = pytest.importorskip("triton", reason="needs triton")
interpreter.enable_without_gpu()

import triton.language as tl  # noqa: E402

from rlk.launch import launch_triton  # noqa: E402
from rlk.math import device_triton  # noqa: E402

DEVICE = "cpu" if interpreter.is_enabled() else "cuda"
BLOCK = 4096


@triton.jit
def apply_1(function: tl.constexpr, a_ptr, y_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + at, mask=at < count, other=0.0)
    tl.store(y_ptr + at, function(a), mask=at < count)


@triton.jit
def apply_2(function: tl.constexpr, a_ptr, b_ptr, y_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + at, mask=at < count, other=0.0)
    b = tl.load(b_ptr + at, mask=at < count, other=0.0)
    tl.store(y_ptr + at, function(a, b), mask=at < count)


@triton.jit
def apply_3(function: tl.constexpr, a_ptr, b_ptr, c_ptr, y_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + at, mask=at < count, other=0.0)
    b = tl.load(b_ptr + at, mask=at < count, other=0.0)
    c = tl.load(c_ptr + at, mask=at < count, other=0.0)
    tl.store(y_ptr + at, function(a, b, c), mask=at < count)


def in_triton(name: str, *operands: torch.Tensor) -> torch.Tensor:
    """A function of device_triton, elementwise."""
    kernel = (apply_1, apply_2, apply_3)[len(operands) - 1]
    operands = tuple(v.to(DEVICE) for v in operands)
    y = torch.empty_like(operands[0])
    grid = (triton.cdiv(y.numel(), BLOCK),)
    launch_triton(kernel, grid, getattr(device_triton, name), *operands, y, y.numel(), BLOCK=BLOCK)
    return y.cpu()


@pytest.mark.parametrize(
    "name",
    ["negate", "exp", "sigmoid", "silu", "sigmoid_derivative", "silu_derivative"],
)
def test_function_hard_inputs_equals_golden(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (50_000,), generator=generator)
    x = torch.cat([hard_cases.exp_inputs(), bits.to(torch.int32).view(torch.float32)])
    assert_same_bits(in_triton(name, x), getattr(golden, name)(x))


def test_fma_special_triples_and_near_ties_equals_golden() -> None:
    operands = hard_cases.fma_operands()
    assert_same_bits(in_triton("fma", *operands), golden.fma(*operands))


def test_sqrt_near_midpoints_equals_golden() -> None:
    x = hard_cases.sqrt_inputs()
    assert_same_bits(in_triton("sqrt", x), golden.sqrt(x))


def test_divide_near_midpoints_equals_golden() -> None:
    operands = hard_cases.divide_operands()
    assert_same_bits(in_triton("divide", *operands), golden.divide(*operands))
