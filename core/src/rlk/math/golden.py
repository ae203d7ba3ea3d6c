# SPDX-License-Identifier: Apache-2.0
"""FP32 functions in PyTorch, one rounding per written operation.

FP32 tensors in and out. Torch's own add, multiply, subtract and divide of two FP32 tensors are
IEEE operations; its sqrt, exp and scalar division are not on every processor, so they are absent.
"""

import torch

from rlk.errors import PlatformError

# 1/ln(2) in FP32: only the choice of n depends on its rounding.
LOG2_E = float.fromhex("0x1.715476p+0")
# ln(2) in two FP32 parts. The step with the first is exact, the second leaves 2^-53 of ln(2).
LN2_HIGH = float.fromhex("0x1.62e430p-1")
LN2_LOW = float.fromhex("-0x1.05c610p-29")
# 1.5 * 2^23: adding it rounds to an integer, n, found in the low bits of the sum. 254 more is
# twice the exponent bias, so that halves of those bits are exponent fields.
ROUND_TO_INTEGER = 12582912.0 + 254.0
# e^r on |r| <= ln(2)/2, highest power first: minimax of the relative error (2^-28.2) with the
# last two fixed at 1, each coefficient rounded to FP32 and the ones above it fitted again.
EXP_COEFFICIENTS = (
    float.fromhex("0x1.6ac74ep-10"),
    float.fromhex("0x1.123de0p-7"),
    float.fromhex("0x1.555858p-5"),
    float.fromhex("0x1.55548cp-3"),
    float.fromhex("0x1.fffffcp-2"),
    1.0,
    1.0,
)
# Beyond these the result is +Inf and +0 anyway; between them the exponent fields do not wrap.
EXP_HIGHEST = 89.0
EXP_LOWEST = -104.0
# Named, because Python computes a written-out constant once, when it compiles.
_SMALLEST_NORMAL, _HALF = 2.0**-1022, 0.5
_ONE, _STEP, _HALF_STEP = 1.0, 2.0**-52, 2.0**-53


def require_subnormals() -> None:
    """Raise if this thread flushes subnormal numbers to zero, or does not round to nearest even.

    A thread's modes hold for FP32 and FP64 alike, so Python's own numbers show them, whatever
    torch's default dtype and device.

    Raises:
        PlatformError: a subnormal product came out as 0, or a tie did not round to even.
    """
    if not _SMALLEST_NORMAL * _HALF > 0:
        raise PlatformError(
            "golden: subnormal numbers must be kept, got them flushed to zero; "
            "call torch.set_flush_denormal(False)"
        )
    # Ties above an even and above an odd significand: each directed mode gets one of them wrong.
    if _ONE + _HALF_STEP != _ONE or (_ONE + _STEP) + _HALF_STEP == _ONE + _STEP:
        raise PlatformError(
            "golden: rounding must be to nearest even, got another mode; "
            "call fesetround(FE_TONEAREST)"
        )


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c, rounded once."""
    product, c = a.double() * b.double(), c.double()  # the product of FP32 values is exact
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    # Round to odd: an inexact FP64 sum gets an odd last bit, on the side of the exact sum, so
    # that rounding it to FP32 is right at ties too. NaN and Inf have no side and stay.
    side = error * total
    bits = total.view(torch.int64)
    odd = torch.where(side > 0, bits | 1, torch.where(side < 0, (bits - 1) | 1, bits))
    return odd.view(torch.float64).float()


def sqrt(x: torch.Tensor) -> torch.Tensor:
    """Square root, rounded once: an FP32 midpoint is 4 or more FP64 ulp away from any root."""
    return x.double().sqrt().float()


def divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a / b of two FP32 tensors, rounded once."""
    return torch.div(*torch.broadcast_tensors(a, b))


def negate(x: torch.Tensor) -> torch.Tensor:
    """x with its sign bit flipped, for zeros and NaN too."""
    return (x.view(torch.int32) ^ -(2**31)).view(torch.float32)


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x to 1 ulp over all of FP32, subnormal results included.

        n = round(x / ln 2),  r = x - n * ln 2,  y = (p(r) * 2^(n>>1)) * 2^(n - (n>>1))

    NaN stays NaN, +Inf gives +Inf, -Inf gives +0.
    """
    rounded = fma(x, _scalar(LOG2_E, x), _scalar(ROUND_TO_INTEGER, x))
    n = rounded - ROUND_TO_INTEGER
    r = fma(n, _scalar(-LN2_HIGH, x), x)
    r = fma(n, _scalar(-LN2_LOW, x), r)
    p = _scalar(EXP_COEFFICIENTS[0], x)
    for coefficient in EXP_COEFFICIENTS[1:]:
        p = fma(p, r, _scalar(coefficient, x))
    exponent = rounded.view(torch.int32)
    half = exponent >> 1
    y = (p * (half << 23).view(torch.float32)) * ((exponent - half) << 23).view(torch.float32)
    y = torch.where(x > EXP_HIGHEST, float("inf"), y)
    return torch.where(x < EXP_LOWEST, 0.0, y)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + e^-x) to 2.5 ulp for x > -88.723, and +0 below.

    As in torch, -Inf gives +0 and +Inf gives 1.
    """
    denominator = 1 + exp(negate(x))
    return divide(torch.ones_like(denominator), denominator)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x) to 4.1 ulp for x > -88.723, and -0 below.

    As in torch, -Inf gives NaN and +Inf gives +Inf.
    """
    return x * sigmoid(x)


def sigmoid_derivative(x: torch.Tensor) -> torch.Tensor:
    """s * (1 - s) with s = sigmoid(x), to an absolute 1.5 * 2^-24; 0 at +-Inf as in torch."""
    s = sigmoid(x)
    return s * (1 - s)


def silu_derivative(x: torch.Tensor) -> torch.Tensor:
    """s * (1 + x * (1 - s)) with s = sigmoid(x), to an absolute 17 * 2^-24.

    NaN at +-Inf, as in torch.
    """
    s = sigmoid(x)
    return s * (1 + x * (1 - s))


def _scalar(value: float, like: torch.Tensor) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float32, device=like.device)
