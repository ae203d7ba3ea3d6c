# SPDX-License-Identifier: Apache-2.0
"""The CUDA functions: constants of golden, and on a GPU the bits of golden for every FP32 input."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlk.cuda import build, toolchain
from rlk.cuda.header import Layout, library_header
from rlk.cuda.launch import binary_for
from rlk.math import golden, hard_cases

HERE = Path(__file__)
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
LAYOUT = Layout(
    "MathTestRange",
    (
        ("void*", "y"),
        ("long long", "first"),
        ("long long", "count"),
        ("void*", "stream"),
        ("int", "function"),
        ("int", "device"),
    ),
)
# Which table, of which activation, and whether its derivative is asked for, or itself.
TABLE_LAYOUT = Layout(
    "MathTestTable",
    (
        ("void*", "y"),
        ("void*", "stream"),
        ("int", "with_derivatives"),
        ("int", "silu"),
        ("int", "derivative"),
        ("int", "others"),
        ("int", "device"),
    ),
)
GENERATED = {
    "rlk_math_test.h": library_header("math_test", (("range", LAYOUT), ("table", TABLE_LAYOUT)))
}
SOURCE = HERE.with_name("test_kernels.cu")
# The order of `evaluate` in test_kernels.cu; after the first five, other forms of the same.
FUNCTIONS = {
    "exp": golden.exp,
    "sigmoid": golden.sigmoid,
    "silu": golden.silu,
    "sigmoid_derivative": golden.sigmoid_derivative,
    "silu_derivative": golden.silu_derivative,
    "reciprocal_of_sum": golden.sigmoid,
    "quotient": golden.sigmoid,
    "sigmoid_among_near": golden.sigmoid,
    "sigmoid_among_far": golden.sigmoid,
    "reciprocal_in_range": lambda x: golden.divide(torch.ones_like(x), x),
    "divide_by_power_of_two": lambda x: golden.divide(x, torch.full_like(x, 2048.0)),
    "reciprocal_root": lambda x: golden.divide(torch.ones_like(x), golden.sqrt(x)),
}
# (table with derivatives, silu, derivative)
LOOK_UPS = {
    "silu": (0, 1, 0),
    "sigmoid": (0, 0, 0),
    "silu_beside_derivative": (1, 1, 0),
    "sigmoid_beside_derivative": (1, 0, 0),
    "silu_derivative": (1, 1, 1),
    "sigmoid_derivative": (1, 0, 1),
}
# BF16 patterns of the values beside: 1/2, the last with an entry, the first without one, 0, NaN.
OTHERS = {"near": 0x3F00, "last": 0xC29F, "first_far": 0x42A0, "zero": 0x0000, "nan": 0x7FC0}
# 8: places of a value among those that are looked up together.
PLACES = 8
# 2^26: inputs of one piece, 256 MiB in FP32.
PIECE = 1 << 26
EVERY = 1 << 32


def constants_of_header() -> dict[str, float]:
    """The FP32 constants that device_cuda.cuh declares."""
    text = HERE.with_name("device_cuda.cuh").read_text()
    found = re.findall(r"^constexpr float (\w+) = ([^;]+);", text, re.MULTILINE)
    return {name: sum(map(number, value.split(" + "))) for name, value in found}


def number(text: str) -> float:
    """A C literal."""
    text = text.removesuffix("f")
    return float.fromhex(text) if text.startswith(("0x", "-0x")) else float(text)


def test_constants_of_the_header_equal_those_of_golden() -> None:
    found = constants_of_header()
    coefficients = {f"EXP_C{6 - i}": c for i, c in enumerate(golden.EXP_COEFFICIENTS[:5])}
    names = ("LOG2_E", "LN2_HIGH", "LN2_LOW", "ROUND_TO_INTEGER", "EXP_HIGHEST", "EXP_LOWEST")
    expected = {name: getattr(golden, name) for name in names} | coefficients
    assert {name: value for name, value in found.items() if name in expected} == expected
    # The only other constant bounds the short form of sigmoid.
    assert found.keys() - expected.keys() == {"SIGMOID_LOWEST"}
    # The last two coefficients are written out as 1.
    assert golden.EXP_COEFFICIENTS[5:] == (1.0, 1.0)


def test_kernels_of_this_test_compile_without_a_gpu() -> None:
    if toolchain.nvcc_missing() is not None:
        pytest.skip("needs nvcc")
    compiled = build.compile_only(SOURCE, "math_test", GENERATED, "sm_90")
    assert "fma.rn.f32" in compiled.ptx


def in_cuda(name: str) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """Fills y with the values at the bit patterns from `first` on."""
    device = torch.cuda.current_device()
    library = binary_for("math_test", SOURCE, GENERATED, device)
    launch = library.function("rlk_math_test_range", [ctypes.c_char_p])
    function = list(FUNCTIONS).index(name)

    def run(first: int, y: torch.Tensor) -> torch.Tensor:
        stream = torch.cuda.current_stream(device).cuda_stream
        values = (y.data_ptr(), first, y.numel(), stream, function, device)
        library.check(launch(LAYOUT.packer.pack(*values)), name)
        return y

    return run


def in_triton(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The values of the same function in Triton."""
    pytest.importorskip("triton", reason="needs triton")
    from rlk.launch import launch_triton
    from rlk.math import device_triton
    from rlk.math.test_device_triton import BLOCK, apply_1

    def run(x: torch.Tensor) -> torch.Tensor:
        y, grid = torch.empty_like(x), (-(-x.numel() // BLOCK),)
        launch_triton(apply_1, grid, getattr(device_triton, name), x, y, x.numel(), BLOCK=BLOCK)
        return y

    return run


def pieces():
    """(first bit pattern, the FP32 values from it on) over all patterns."""
    for first in range(0, EVERY, PIECE):
        bits = torch.arange(first, first + PIECE, device="cuda")
        yield first, torch.where(bits < 1 << 31, bits, bits - EVERY).int().view(torch.float32)


def forms_by_value() -> list[list[str]]:
    """The functions, those together that golden computes by one."""
    forms: dict[Callable, list[str]] = {}
    for name, function in FUNCTIONS.items():
        forms.setdefault(function, []).append(name)
    return list(forms.values())


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many elements have other bits; NaN is one value."""
    same = (a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())
    return int((~same).sum())


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("names", forms_by_value(), ids="-".join)
def test_cuda_every_fp32_input_has_the_bits_of_golden(names: list[str]) -> None:
    """Golden computes here too: torch's FP64 and FP32 operations are IEEE on a GPU."""
    runs, y = {name: in_cuda(name) for name in names}, torch.empty(PIECE, device="cuda")
    counts = dict.fromkeys(names, 0)
    for first, x in pieces():
        # Once for all forms: it takes far longer than a kernel.
        expected = FUNCTIONS[names[0]](x)
        for name, run in runs.items():
            counts[name] += differing(run(first, y), expected)
    assert not any(counts.values()), counts


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("name", list(FUNCTIONS)[:5])
def test_cuda_every_fp32_input_has_the_bits_of_triton(name: str) -> None:
    run, y, other = in_cuda(name), torch.empty(PIECE, device="cuda"), in_triton(name)
    assert sum(differing(run(first, y), other(x)) for first, x in pieces()) == 0


@pytest.mark.gpu
@NEEDS_GPU
def test_exp_every_fp32_input_stays_within_its_bound_of_fp64() -> None:
    run, y = in_cuda("exp"), torch.empty(PIECE, device="cuda")
    for first, x in pieces():
        got, exact = run(first, y).double(), x.double().exp()
        nan = x.isnan()
        assert bool((got.isnan() == nan).all())
        # FLT_MAX and half an ulp: from here on the nearest FP32 is Inf.
        overflow = exact >= hard_cases.FLT_MAX + 2.0**103
        assert bool((got.isinf() == overflow)[~nan].all())
        # The distance of FP32 neighbours at the exact value, as an FP64 exponent field.
        exponent = exact.clamp(min=2.0**-149).frexp().exponent.long() - 1
        spacing = ((exponent.clamp(min=-126) - 23 + 1023) << 52).view(torch.float64)
        off = (got - exact).abs() > hard_cases.EXP_ULP * spacing
        assert int((off & ~overflow & ~nan).sum()) == 0


def looked_up(name: str, others: int) -> torch.Tensor:
    """[8, 65536]: what a table gives for every BF16 pattern at each place among others."""
    device = torch.cuda.current_device()
    library = binary_for("math_test", SOURCE, GENERATED, device)
    launch = library.function("rlk_math_test_table", [ctypes.c_char_p])
    y = torch.empty(PLACES, 1 << 16, device="cuda")
    stream = torch.cuda.current_stream(device).cuda_stream
    packed = TABLE_LAYOUT.packer.pack(y.data_ptr(), stream, *LOOK_UPS[name], others, device)
    library.check(launch(packed), name)
    return y


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("name", LOOK_UPS)
def test_tables_every_bf16_input_has_the_bits_of_golden(name: str, others: str) -> None:
    every = torch.arange(1 << 16, device="cuda") << 16
    z = torch.where(every < 1 << 31, every, every - EVERY).int().view(torch.float32)
    expected = getattr(golden, name.partition("_beside")[0])(z)
    assert differing(looked_up(name, OTHERS[others]), expected.expand(PLACES, -1)) == 0
