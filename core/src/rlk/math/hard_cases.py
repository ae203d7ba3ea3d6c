# SPDX-License-Identifier: Apache-2.0
"""Inputs where FP32 functions go wrong, and the error bounds of this implementation."""

import math

import torch

# Error bounds in ulp of the exact result. Exhaustive over all FP32 inputs: 0.8914 at -5.84864.
EXP_ULP = 1.0
# For x >= SIGMOID_LOWEST; exhaustive: 2.4807 at -16.6357.
SIGMOID_ULP = 2.5
# For x >= SIGMOID_LOWEST; exhaustive: 4.0363 at -88.3711, where the factor is subnormal.
SILU_ULP = 4.1
# Below it e^-x overflows: sigmoid is +0 and silu -0, off by up to 2^21 and 2^24 subnormal steps.
SIGMOID_LOWEST = float.fromhex("-0x1.62e42ep+6")
# Absolute errors in units of 2^-24, as derivatives pass through 0 where ulp mean nothing.
# 1 - s is a multiple of 2^-24, and silu's derivative multiplies its error by x <= 17.3.
# Exhaustive: 1.4978 and 16.365.
SIGMOID_DERIVATIVE_UNITS = 1.5
SILU_DERIVATIVE_UNITS = 17.0
UNIT = 2.0**-24

FLT_MAX = (2 - 2.0**-23) * 2.0**127


def special_values() -> torch.Tensor:
    """[16]: zeros, subnormals, ends of the range, neighbours of 1, Inf, NaN."""
    tiny, normal = 2.0**-149, 2.0**-126
    return torch.tensor(
        [
            0.0, -0.0, tiny, -tiny, normal - tiny, normal, 2.0**-75, 1.0, -1.0,
            1 + 2.0**-23, -(1 - 2.0**-24), FLT_MAX, -FLT_MAX, math.inf, -math.inf, math.nan,
        ]
    )  # fmt: skip


def fma_operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, b, c: all 4096 triples of special values, then sums close to ties."""
    special = special_values()
    a, b, c = (v.flatten() for v in torch.meshgrid(special, special, special, indexing="ij"))
    # (1 + k 2^-23)(1 - k 2^-23) 2^-24 is half an ulp of 1 + m 2^-23 but for k^2 2^-70, too little
    # for FP64 to see. With 2^-25 and 2^-23 the sum is far from a tie.
    axes = (torch.arange(1.0, 65.0), torch.arange(0.0, 9.0), torch.arange(-25.0, -22.0))
    k, m, exponent, sign = (
        v.flatten() for v in torch.meshgrid(*axes, torch.tensor([1.0, -1.0]), indexing="ij")
    )
    k, m, scale = k * 2.0**-23, m * 2.0**-23, torch.exp2(exponent)
    near = ((1 + k) * sign, (1 - k) * scale, 1 + m)
    # The same at the bottom of the range, where results are subnormal.
    low = ((1 + k) * sign * 2.0**-63, (1 - k) * scale * 2.0**-63, m * 2.0**-126)
    a, b, c = (torch.cat(v) for v in zip((a, b, c), near, low, strict=True))
    return a, b, c


def exp_inputs() -> torch.Tensor:
    """Neighbourhoods of every place where the result or the method changes its kind."""
    places = [
        0.0,
        88.72283935546875,  # overflow
        -87.33654475,  # largest subnormal result
        -103.97207642,  # underflow to 0
        89.0,  # first input answered without arithmetic
        -104.0,
        -5.848638,  # largest error
        88.0296919,  # n becomes 127, then 128
        88.3762626,
        *(math.log(2) * (n + 0.5) for n in range(-151, 129)),  # n changes
        *(math.log(2) * n for n in range(-151, 129)),  # r changes its sign
    ]
    near = torch.tensor(places).view(torch.int32)[:, None] + torch.arange(-4, 5, dtype=torch.int32)
    wide = torch.exp2(torch.arange(-149.0, 128.0))
    finite = torch.cat([near.view(torch.float32).flatten(), wide, special_values()])
    return torch.cat([finite, -finite])


def sqrt_inputs() -> torch.Tensor:
    """Values next to the squares of FP32 midpoints, and of FP32 values."""
    step = torch.arange(0, 2**24, 40961).double()
    squares = torch.cat([(1 + step * 2.0**-24) ** 2, (1 + (step + 0.5) * 2.0**-24) ** 2]).float()
    near = squares.view(torch.int32)[:, None] + torch.arange(-1, 2, dtype=torch.int32)
    values = near.view(torch.float32).flatten()
    scaled = [values, values * 2.0**126, values * 2.0**-126, values * 2.0**-140]
    return torch.cat([*scaled, special_values()])


def divide_operands() -> tuple[torch.Tensor, torch.Tensor]:
    """a, b: all pairs of special values, then quotients close to ties, some subnormal."""
    special = special_values()
    a, b = (v.flatten() for v in torch.meshgrid(special, special, indexing="ij"))
    # The product of a midpoint and a divisor, rounded: its quotient is as close to a tie as any.
    divisor = 1 + torch.arange(0, 2**23, 8191).double() * 2.0**-23
    midpoint = 1 + (torch.arange(0, 2**23, 8191).double().flip(0) + 0.5) * 2.0**-23
    near = (divisor * midpoint).float()
    divisor = divisor.float()
    low = (near * 2.0**-100, divisor * 2.0**36)
    return torch.cat([a, near, low[0]]), torch.cat([b, divisor, low[1]])
