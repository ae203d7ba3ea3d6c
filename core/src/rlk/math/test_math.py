# SPDX-License-Identifier: Apache-2.0
"""Golden functions against correctly rounded MPFR arithmetic and FP64."""

import ctypes
import platform
from collections.abc import Callable, Iterator

import gmpy2
import numpy as np
import pytest
import torch

from rlk.compare import assert_same_bits
from rlk.errors import PlatformError
from rlk.math import golden, hard_cases

# MPFR's view of FP32: emin and emax are for significands in [0.5, 1).
FP32 = gmpy2.context(precision=24, emin=-148, emax=128, subnormalize=True)
# In cache; a longer piece is slower.
PIECE = 1 << 14


def rounded(function: Callable, *operands: torch.Tensor) -> torch.Tensor:
    """The FP32 results of an MPFR function, each rounded once."""
    columns = [[gmpy2.mpfr(v) for v in operand.tolist()] for operand in operands]
    with gmpy2.context(FP32):
        values = [float(function(*row)) for row in zip(*columns, strict=True)]
    return torch.tensor(values, dtype=torch.float64).float()


def exact_exp(x: np.ndarray) -> np.ndarray:
    return np.exp(x)


def exact_sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def exact_silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def exact_sigmoid_derivative(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return e / (1 + e) ** 2


def exact_silu_derivative(x: np.ndarray) -> np.ndarray:
    return exact_sigmoid(x) + x * exact_sigmoid_derivative(x)


def bf16_and_fp16() -> torch.Tensor:
    """Every finite BF16 and FP16 value, as FP32."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = torch.cat([bits.view(torch.bfloat16).float(), bits.view(torch.float16).float()])
    return values[torch.isfinite(values)]


def ten_million(lowest: float) -> Iterator[torch.Tensor]:
    """10^7 FP32 values in pieces: half uniform from lowest to 89, half uniform in their bits."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(-(-5_000_000 // PIECE)):
        yield torch.rand(PIECE, generator=generator) * (89 - lowest) + lowest
        # 2^-30 .. 2^7 with both signs: smaller ones all give 1, larger ones 0 or Inf.
        bits = torch.randint(97 << 23, 134 << 23, (PIECE,), generator=generator)
        values = bits.to(torch.int32).view(torch.float32)
        negative = torch.rand(PIECE, generator=generator) < 0.5
        yield torch.where(negative & (values <= -lowest), -values, values)


def worst_ulp(function: Callable, exact: Callable, x: torch.Tensor) -> float:
    """Largest error in FP32 ulp of the exact result; a result that must be Inf has to be."""
    got, want = function(x).numpy().astype(np.float64), exact(x.numpy().astype(np.float64))
    # FLT_MAX and half an ulp: from here on the nearest FP32 is Inf.
    overflow = np.abs(want) >= hard_cases.FLT_MAX + 2.0**103
    assert np.array_equal(np.isinf(got), overflow)
    # The exponent field of the FP64 result; FP32 has none below -126.
    exponent = np.maximum((want.view(np.int64) >> 52 & 0x7FF) - 1023, -126)
    error = np.abs(np.where(overflow, 0, got) - np.where(overflow, 0, want))
    return float(np.max(error * np.exp2(23.0 - exponent)))


FUNCTIONS = {
    "exp": (golden.exp, exact_exp, hard_cases.EXP_ULP, -105.0),
    "sigmoid": (
        golden.sigmoid, exact_sigmoid, hard_cases.SIGMOID_ULP, hard_cases.SIGMOID_LOWEST,
    ),
    "silu": (golden.silu, exact_silu, hard_cases.SILU_ULP, hard_cases.SIGMOID_LOWEST),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_every_bf16_and_fp16_input_stays_within_ulp(name: str) -> None:
    function, exact, bound, lowest = FUNCTIONS[name]
    x = torch.cat([bf16_and_fp16(), hard_cases.exp_inputs()])
    x = x[torch.isfinite(x) & ((x >= lowest) | (name == "exp"))]
    assert worst_ulp(function, exact, x) <= bound


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_ten_million_fp32_inputs_stay_within_ulp(name: str) -> None:
    function, exact, bound, lowest = FUNCTIONS[name]
    assert max(worst_ulp(function, exact, x) for x in ten_million(lowest)) <= bound


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize(
    ("function", "exact", "units"),
    [
        (
            golden.sigmoid_derivative,
            exact_sigmoid_derivative,
            hard_cases.SIGMOID_DERIVATIVE_UNITS,
        ),
        (golden.silu_derivative, exact_silu_derivative, hard_cases.SILU_DERIVATIVE_UNITS),
    ],
    ids=["sigmoid", "silu"],
)
def test_derivative_every_bf16_and_fp16_input_stays_within_units(
    function: Callable, exact: Callable, units: float
) -> None:
    x = bf16_and_fp16()
    error = np.abs(function(x).numpy() - exact(x.numpy().astype(np.float64)))
    assert float(error.max()) <= units * hard_cases.UNIT


def test_exp_hard_inputs_stay_within_one_ulp_of_mpfr() -> None:
    x = hard_cases.exp_inputs()
    x = x[~torch.isnan(x)]
    # At most 1 ulp from the exact value: the rounded result or a neighbour of it.
    got, want = golden.exp(x), rounded(gmpy2.exp, x)
    below, above = (torch.nextafter(want, torch.full_like(want, end)) for end in (0, torch.inf))
    assert bool(((got == want) | (got == below) | (got == above)).all())


@pytest.mark.parametrize(
    ("function", "in_torch", "expected"),
    [
        # At +Inf, -Inf, +0, -0, NaN.
        ("exp", None, [torch.inf, 0.0, 1.0, 1.0, torch.nan]),
        ("sigmoid", torch.sigmoid, [1.0, 0.0, 0.5, 0.5, torch.nan]),
        ("silu", torch.nn.functional.silu, [torch.inf, torch.nan, 0.0, -0.0, torch.nan]),
        ("sigmoid_derivative", None, [0.0, 0.0, 0.25, 0.25, torch.nan]),
        ("silu_derivative", None, [torch.nan, torch.nan, 0.5, 0.5, torch.nan]),
    ],
)
def test_function_zeros_and_limits_are_those_of_torch(
    function: str, in_torch: Callable | None, expected: list[float]
) -> None:
    x = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, torch.nan])
    assert_same_bits(getattr(golden, function)(x), torch.tensor(expected))
    if in_torch is not None:
        assert_same_bits(in_torch(x), torch.tensor(expected))


def test_fma_special_triples_and_near_ties_equal_mpfr() -> None:
    operands = hard_cases.fma_operands()
    assert_same_bits(golden.fma(*operands), rounded(gmpy2.fma, *operands))


def test_fma_random_bits_equal_mpfr() -> None:
    generator = torch.Generator().manual_seed(2)
    bits = torch.randint(-(2**31), 2**31, (3, 20_000), generator=generator)
    a, b, c = bits.to(torch.int32).view(torch.float32)
    # Half of the addends as large as the product, so that they interact.
    c = torch.where(torch.arange(20_000) % 2 == 0, c, a * b * 1.7)
    assert_same_bits(golden.fma(a, b, c), rounded(gmpy2.fma, a, b, c))


def test_sqrt_near_midpoints_equals_mpfr() -> None:
    x = hard_cases.sqrt_inputs()
    assert_same_bits(golden.sqrt(x), rounded(gmpy2.sqrt, x))


def test_divide_near_midpoints_equals_mpfr() -> None:
    a, b = hard_cases.divide_operands()
    assert_same_bits(golden.divide(a, b), rounded(gmpy2.div, a, b))


def test_negate_special_values_flips_the_sign_bit() -> None:
    x = hard_cases.special_values()
    assert torch.equal(torch.signbit(golden.negate(x)), ~torch.signbit(x))
    assert_same_bits(golden.negate(x).abs(), x.abs())


def test_require_subnormals_flushing_process_is_refused() -> None:
    golden.require_subnormals()
    if not torch.set_flush_denormal(True):
        pytest.skip("needs a processor that can flush subnormals")
    try:
        with pytest.raises(PlatformError, match="set_flush_denormal"):
            golden.require_subnormals()
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_require_subnormals_does_not_depend_on_default_dtype_and_device(dtype: torch.dtype) -> None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            golden.require_subnormals()
            if torch.set_flush_denormal(True):
                with pytest.raises(PlatformError, match="set_flush_denormal"):
                    golden.require_subnormals()
    finally:
        torch.set_flush_denormal(False)
        torch.set_default_dtype(default)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs the rounding modes of x86")
@pytest.mark.parametrize("mode", [0x400, 0x800, 0xC00], ids=["down", "up", "toward zero"])
def test_require_subnormals_directed_rounding_is_refused(mode: int) -> None:
    library = ctypes.CDLL(None)
    assert library.fesetround(mode) == 0
    try:
        with pytest.raises(PlatformError, match="rounding must be to nearest even"):
            golden.require_subnormals()
    finally:
        library.fesetround(0)
    golden.require_subnormals()
