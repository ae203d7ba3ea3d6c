# SPDX-License-Identifier: Apache-2.0
"""FP32 functions in Triton, operation by operation as in `golden`."""

import triton
import triton.language as tl

from rlk import interpreter
from rlk.math import golden

# Constants have their reasons in `golden`.
_LOG2_E = tl.constexpr(golden.LOG2_E)
_LN2_HIGH = tl.constexpr(golden.LN2_HIGH)
_LN2_LOW = tl.constexpr(golden.LN2_LOW)
_ROUND_TO_INTEGER = tl.constexpr(golden.ROUND_TO_INTEGER)
_C6 = tl.constexpr(golden.EXP_COEFFICIENTS[0])
_C5 = tl.constexpr(golden.EXP_COEFFICIENTS[1])
_C4 = tl.constexpr(golden.EXP_COEFFICIENTS[2])
_C3 = tl.constexpr(golden.EXP_COEFFICIENTS[3])
_C2 = tl.constexpr(golden.EXP_COEFFICIENTS[4])
_HIGHEST = tl.constexpr(golden.EXP_HIGHEST)
_LOWEST = tl.constexpr(golden.EXP_LOWEST)
# -87: below it e^x vanishes beside 1, and above it the exponent field of e^x / 2 is a normal one.
_SIGMOID_LOWEST = tl.constexpr(-87.0)
# 126: the bias less the halving, so that n + 126 in the low bits is an exponent field.
_ROUND_TO_FIELD = tl.constexpr(12582912.0 + 126.0)
_INTERPRETED = tl.constexpr(interpreter.is_enabled())


def _reciprocals() -> str:
    """PTX of `reciprocals`: operands 0 to 7 from 8 to 15."""
    lanes = range(8)
    numbers = ", ".join(f"d{i}" for i in lanes)
    return "\n".join([
        f"{{ .reg .pred near; .reg .u32 top, u<8>; .reg .f32 e<8>, y<8>, {numbers};",
        *(f"mov.b32 u{i}, ${8 + i}; mov.b32 d{i}, u{i};" for i in lanes),
        # Patterns of positive numbers are in their order, and those of NaN above them.
        "max.u32 top, u0, u1;",
        *(f"max.u32 top, top, u{i};" for i in lanes[2:]),
        "setp.lt.u32 near, top, 0x7E800000;",  # 2^126
        "@near bra NEAR;",
        *(f"rcp.rn.f32 ${i}, d{i};" for i in lanes),
        "bra DONE;",
        "NEAR:",
        *(f"rcp.approx.ftz.f32 y{i}, d{i};" for i in lanes),
        *(f"neg.f32 e{i}, d{i}; fma.rn.f32 e{i}, e{i}, y{i}, 0f3F800000;" for i in lanes),
        *(f"fma.rn.f32 ${i}, y{i}, e{i}, y{i};" for i in lanes),
        "DONE:",
        "}",
    ])  # fmt: skip


_RECIPROCALS = tl.constexpr(_reciprocals())


@triton.jit
def fma(a, b, c):
    """a * b + c, rounded once."""
    return tl.fma(a, b, c)


@triton.jit
def sqrt(x):
    """Square root, rounded once."""
    return tl.sqrt_rn(x)


@triton.jit
def divide(a, b):
    """a / b, rounded once."""
    return tl.div_rn(a, b)


@triton.jit
def reciprocal(x):
    """1 / x, rounded once: the bits of divide(1, x) in fewer steps.

    Triton's interpreter knows no instructions of PTX, and Triton no other name for this one.
    """
    if _INTERPRETED:
        result = tl.div_rn(1.0, x)
    else:
        result = tl.inline_asm_elementwise(
            "rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def reciprocals(x):
    """`reciprocal` of numbers from 1 on, eight of a thread at a time.

    One test of the range serves eight, so that no branch stands between their operations. Below
    2^126 they are an estimate and one Newton step, as hardware division takes them. A kernel that
    calls this allows `check_ptx` the estimate; a test of device_cuda.cuh holds all numbers to it.
    """
    if _INTERPRETED:
        result = tl.div_rn(1.0, x)
    else:
        result = tl.inline_asm_elementwise(
            _RECIPROCALS, "=f,=f,=f,=f,=f,=f,=f,=f,f,f,f,f,f,f,f,f", [x],
            dtype=tl.float32, is_pure=True, pack=8,
        )  # fmt: skip
    return result


@triton.jit
def hardware_rsqrt(x):
    """1 / sqrt(x) to about 1 ulp, as NVIDIA's instruction gives it: no IEEE operation.

    Triton's own rsqrt flushes subnormals; its interpreter has neither.
    """
    return tl.inline_asm_elementwise(
        "rsqrt.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def negate(x):
    """x with its sign bit flipped: Triton 3.6 compiles `-x` to `0 - x`."""
    return (x.to(tl.int32, bitcast=True) ^ -2147483648).to(tl.float32, bitcast=True)


@triton.jit
def _exp_remainder(x, n):
    """e^(x - n ln 2), the polynomial of golden."""
    r = tl.fma(n, -_LN2_HIGH, x)
    r = tl.fma(n, -_LN2_LOW, r)
    p = tl.fma(r, _C6, _C5)
    p = tl.fma(p, r, _C4)
    p = tl.fma(p, r, _C3)
    p = tl.fma(p, r, _C2)
    p = tl.fma(p, r, 1.0)
    return tl.fma(p, r, 1.0)


@triton.jit
def exp(x):
    """e^x to 1 ulp over all of FP32."""
    rounded = tl.fma(x, _LOG2_E, _ROUND_TO_INTEGER)
    p = _exp_remainder(x, rounded - _ROUND_TO_INTEGER)
    exponent = rounded.to(tl.int32, bitcast=True)
    half = exponent >> 1
    y = p * (half << 23).to(tl.float32, bitcast=True)
    y = y * ((exponent - half) << 23).to(tl.float32, bitcast=True)
    y = tl.where(x > _HIGHEST, float("inf"), y)
    return tl.where(x < _LOWEST, 0.0, y)


@triton.jit
def _one_plus_exp_negated(x):
    """1 + e^-x with the bits of 1 + exp(negate(x)), in fewer steps.

    One scaling by 2^(n - 1), whose doubling is exact, and a clamp for both ends, which only
    changes terms that 1 absorbs.
    """
    t = tl.maximum(negate(x), _SIGMOID_LOWEST, propagate_nan=tl.PropagateNan.ALL)
    t = tl.minimum(t, _HIGHEST, propagate_nan=tl.PropagateNan.ALL)
    rounded = tl.fma(t, _LOG2_E, _ROUND_TO_FIELD)
    p = _exp_remainder(t, rounded - _ROUND_TO_FIELD)
    half = p * (rounded.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
    return tl.fma(half, 2.0, 1.0)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return reciprocals(_one_plus_exp_negated(x))


@triton.jit
def silu(x):
    """x * sigmoid(x)."""
    return x * sigmoid(x)


@triton.jit
def sigmoid_derivative(x):
    """s * (1 - s) with s = sigmoid(x)."""
    s = sigmoid(x)
    return s * (1.0 - s)


@triton.jit
def silu_derivative(x):
    """s * (1 + x * (1 - s)) with s = sigmoid(x)."""
    s = sigmoid(x)
    return s * (1.0 + x * (1.0 - s))
