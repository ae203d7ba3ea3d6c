# SPDX-License-Identifier: Apache-2.0
"""What callers of the device functions rely on, and the instructions they compile to."""

import os
import re
import subprocess
import sys

import pytest
import torch

from rlk import interpreter
from rlk.compare import assert_same_bits
from rlk.reduce import exact_sum

# Before anything imports triton.
interpreter.enable_without_gpu()
triton = pytest.importorskip("triton", reason="needs triton")

import triton.language as tl  # noqa: E402

from rlk.launch import launch_triton  # noqa: E402
from rlk.reduce.exact_sum.device_triton import (  # noqa: E402
    MAX_TERMS,
    add_block,
    add_levels,
    add_terms,
    no_terms,
    takes,
    window,
)

DEVICE = "cpu" if interpreter.is_enabled() else "cuda"


@triton.jit
def add_block_kernel(  # type: ignore[no-untyped-def]
    state_ptr, c_ptr, mask_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = row[:, None] * COLUMNS + column[None, :]
    mask = tl.load(mask_ptr + at) != 0
    add_block(state_ptr, column, COLUMNS, tl.load(c_ptr + at), mask)


def block_sum(c: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The FP32 sums that one call of add_block leads to."""
    state = exact_sum.new(c.shape[1], DEVICE)
    operands = (state, c.to(DEVICE), mask.to(torch.int32).to(DEVICE))
    launch_triton(add_block_kernel, (1,), *operands, ROWS=c.shape[0], COLUMNS=c.shape[1])
    return exact_sum.round(state, torch.float32, backend="triton").cpu()


@pytest.mark.parametrize("exponent", [-126, 0, 119])
def test_add_block_256_full_significands_do_not_wrap(exponent: int) -> None:
    value = (2 - 2.0**-23) * 2.0**exponent
    c = torch.full((256, 2), value) * torch.tensor([1.0, -1.0])
    assert_same_bits(block_sum(c, torch.ones(256, 2)), torch.tensor([256 * value, -256 * value]))


def test_add_block_masked_values_are_not_added() -> None:
    c = torch.tensor([[1.0, 2.0], [torch.nan, 2.0**100], [-torch.inf, 4.0], [8.0, 8.0]])
    mask = torch.tensor([[1, 0], [0, 0], [0, 1], [1, 0]])
    assert_same_bits(block_sum(c, mask), torch.tensor([9.0, 4.0]))


def test_add_block_special_beside_finite_counts_and_adds() -> None:
    c = torch.tensor([[torch.nan, torch.inf, 1.0, 3.0], [1.0, 2.0**127, 2.0**-149, -torch.inf]])
    want = torch.tensor([torch.nan, torch.inf, 1.0, -torch.inf])
    assert_same_bits(block_sum(c, torch.ones(2, 4)), want)


# On a GPU too, where the largest exponent of a block is found by its threads.
@pytest.mark.gpu
def test_add_block_windows_apart_keep_the_middle() -> None:
    c = torch.tensor([[2.0**100], [1 + 2.0**-23], [-(2.0**100)], [2.0**-149]])
    assert_same_bits(block_sum(c, torch.ones(4, 1)), torch.tensor([1 + 2.0**-23]))


@triton.jit
def add_levels_kernel(  # type: ignore[no-untyped-def]
    state_ptr, c_ptr, noted_ptr, blocks, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = row[:, None] * COLUMNS + column[None, :]
    unit = window(tl.load(c_ptr + at))
    upper, lower, missed = no_terms(ROWS, COLUMNS)
    for block in range(blocks):
        c = tl.load(c_ptr + block * ROWS * COLUMNS + at)
        upper, lower, missed = add_terms(upper, lower, missed, c, unit)
    add_levels(state_ptr, column, COLUMNS, upper, lower, unit)
    tl.store(noted_ptr, tl.max(missed))
    for block in range(blocks):
        c = tl.load(c_ptr + block * ROWS * COLUMNS + at)
        add_block(state_ptr, column, COLUMNS, c, ~takes(c, unit))


def level_sum(c: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The FP32 sums of rows [B, R, C], and whether a term was noted that levels do not take."""
    state = exact_sum.new(c.shape[2], DEVICE)
    noted = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    shape = {"ROWS": c.shape[1], "COLUMNS": c.shape[2]}
    launch_triton(add_levels_kernel, (1,), state, c.to(DEVICE), noted, c.shape[0], **shape)
    return exact_sum.round(state, torch.float32, backend="triton").cpu(), bool(noted)


def golden_sum(c: torch.Tensor) -> torch.Tensor:
    """The FP32 sums of rows [B, R, C]."""
    state = exact_sum.add_rows(exact_sum.new(c.shape[2]), c.flatten(0, 1), backend="golden")
    return exact_sum.round(state, torch.float32, backend="golden")


# A first term chooses the unit 2^-33 below its binade, within bounds; windows of it are from 2^-23
# to 2^45 units. Terms at both ends, where levels cut, and between; then at both ends of FP32.
@pytest.mark.parametrize(
    ("first", "exponent"),
    [(0, e) for e in (-56, -40, -35, -34, -33, -20, 0, 10, 11)]
    + [(-149, -126), (-100, -126), (-71, -126), (127, 116), (127, 104), (105, 49)],
)
def test_levels_full_of_the_largest_terms_do_not_round(first: int, exponent: int) -> None:
    generator = torch.Generator().manual_seed(exponent + 200)
    significands = 2 - torch.randint(1, 9, (MAX_TERMS.value, 2, 8), generator=generator) * 2.0**-23
    c = significands * 2.0**exponent
    c[:, :, 1::2] *= -1
    c[0] = 0
    c[0, 0, 0] = 2.0**first
    sums, noted = level_sum(c)
    # A subnormal first term is as zero, and the largest is beyond the last window.
    assert noted == (first in (-149, 127))
    assert_same_bits(sums, golden_sum(c))


# Of each level the largest terms, and small ones that it or the next takes.
@pytest.mark.parametrize(("large", "small"), [(11, -9), (11, -19), (11, -56), (-34, -56)])
def test_levels_small_terms_survive_large_ones_that_cancel(large: int, small: int) -> None:
    generator = torch.Generator().manual_seed(3)
    one = torch.ones(1, 2, 8)
    big = (2 - 2.0**-23) * torch.full((100, 2, 8), 2.0**large)
    odd = 1 + torch.randint(0, 1 << 22, (54, 2, 8), generator=generator) * 2.0**-22 + 2.0**-23
    c = torch.cat([one, big, odd * 2.0**small, -big, -one])
    sums, noted = level_sum(c)
    assert not noted
    assert_same_bits(sums, golden_sum(c))


@pytest.mark.parametrize("scale", [-80, -40, 0, 40, 80])
def test_levels_of_any_magnitudes_keep_small_terms(scale: int) -> None:
    generator = torch.Generator().manual_seed(7)
    c = torch.randn(64, 4, 8, generator=generator)
    c = torch.ldexp(c, torch.randint(-20, 8, c.shape, generator=generator))
    c = torch.cat([torch.ones(1, 4, 8), c, -c[::2], torch.zeros(1, 4, 8)])
    c = torch.ldexp(c, torch.tensor(scale))
    sums, noted = level_sum(c)
    assert not noted
    assert_same_bits(sums, golden_sum(c))


@pytest.mark.parametrize("other", [2.0**12, -(2.0**127), 2.0**-57, 2.0**-149, torch.inf, torch.nan])
def test_levels_note_what_they_do_not_take(other: float) -> None:
    c = torch.ones(3, 2, 8)
    c[1, 1, 3] = other
    sums, noted = level_sum(c)
    assert noted
    assert_same_bits(sums, golden_sum(c))


# What cannot choose a unit: zeros, and numbers beside what is none.
@pytest.mark.parametrize("other", [0.0, -0.0, torch.inf, torch.nan])
def test_levels_of_a_first_block_without_a_size_take_usual_terms(other: float) -> None:
    c = torch.full((3, 2, 8), 3.0)
    c[0] = 0.0
    c[0, :, ::2] = other
    sums, noted = level_sum(c)
    assert noted == (other != 0.0)
    assert_same_bits(sums, golden_sum(c))


# Compilation needs a process in which triton was imported without its interpreter.
COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rlk.reduce.exact_sum import kernel_triton as k

def compiled(kernel, signature, **constants):
    signature = {**signature, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=target, options={"enable_fp_fusion": False}).asm["ptx"]

i32 = dict.fromkeys(("row_count", "columns", "row_stride"), "i32")
for capability in sys.argv[1:]:
    target = GPUTarget("cuda", int(capability), 32)
    print(compiled(k.add_rows_kernel, {"state_ptr": "*i64", "rows_ptr": "*bf16", **i32},
                   column_stride=1, ROWS=k.ROWS, COLUMNS=k.COLUMNS))
    print(compiled(k.normalise_kernel, {"state_ptr": "*i64", "columns": "i32"}, COLUMNS=128))
    print(compiled(k.round_kernel, {"out_ptr": "*i16", "state_ptr": "*i64", "columns": "i32"},
                   PRECISION=8, LOWEST_BIT=16, INFINITY=0x7F80, SIGN=-(2**15), COLUMNS=128))
"""


def test_kernels_compiled_use_integer_instructions_only() -> None:
    capabilities = ["80", "90", "100", "120"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", COMPILE, *capabilities]
    ptx = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    # The load of BF16 rows is widened; nothing else is floating point.
    floating = re.findall(r"\b[\w.]*\.(?:f16|bf16|f32|f64)[\w.]*", ptx)
    assert set(floating) <= {"cvt.f32.bf16"}
    atomics = re.findall(r"\b(?:atom|red)\.[\w.]*", ptx)
    assert {a.split(".", 1)[1] for a in atomics} == {"global.gpu.relaxed.add.u64"}
    # Three pieces of a window and three counters.
    assert len(atomics) == 6 * len(capabilities)
