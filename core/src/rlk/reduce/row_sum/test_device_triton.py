# SPDX-License-Identifier: Apache-2.0
"""The Triton chunk sums, looped over as operators do, give the bytes of golden."""

import pytest
import torch

from rlk import interpreter
from rlk.compare import assert_same_bits
from rlk.reduce.row_sum import golden, hard_cases

triton = pytest.importorskip("triton", reason="needs triton")
interpreter.enable_without_gpu()

import triton.language as tl  # noqa: E402

from rlk.launch import launch_triton  # noqa: E402
from rlk.reduce.row_sum.device_triton import chunk_dot, chunk_sum, row_dot, row_sum  # noqa: E402

DEVICE = "cpu" if interpreter.is_enabled() else "cuda"


@triton.jit
def row_kernel(a_ptr, b_ptr, y_ptr, rows, length, DOT: tl.constexpr, R: tl.constexpr):
    row = tl.program_id(0) * R + tl.arange(0, R)
    total = tl.zeros((R,), tl.float32)
    for start in range(0, length, 256):
        column = start + tl.arange(0, 256)
        at = row[:, None] * length + column[None, :]
        mask = (row[:, None] < rows) & (column[None, :] < length)
        a = tl.load(a_ptr + at, mask=mask, other=0.0)
        if DOT:
            total = total + chunk_dot(a, tl.load(b_ptr + at, mask=mask, other=0.0))
        else:
            total = total + chunk_sum(a)
    tl.store(y_ptr + row, total + 0.0, mask=row < rows)


@triton.jit
def whole_row_kernel(
    a_ptr, b_ptr, y_ptr, rows, length, DOT: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.arange(0, WIDTH)
    at = row[:, None] * length + column[None, :]
    mask = (row[:, None] < rows) & (column[None, :] < length)
    total = tl.load(a_ptr + at, mask=mask, other=0.0)
    if DOT:
        total = row_dot(total, tl.load(b_ptr + at, mask=mask, other=0.0))
    else:
        total = row_sum(total)
    tl.store(y_ptr + row, total, mask=row < rows)


def whole_in_triton(a: torch.Tensor, b: torch.Tensor | None, width: int) -> torch.Tensor:
    """Row sums of a, or of a * b, by programs that hold rows padded to a width."""
    rows, length = a.shape
    y = torch.empty(rows, device=DEVICE)
    operands = (a.to(DEVICE), (a if b is None else b).to(DEVICE), y, rows, length)
    grid = (triton.cdiv(rows, 4),)
    launch_triton(whole_row_kernel, grid, *operands, DOT=b is not None, R=4, WIDTH=width)
    return y.cpu()


def in_triton(a: torch.Tensor, b: torch.Tensor | None, rows_per_program: int) -> torch.Tensor:
    """Row sums of a, or of a * b."""
    rows, length = a.shape
    y = torch.empty(rows, device=DEVICE)
    operands = (a.to(DEVICE), (a if b is None else b).to(DEVICE), y, rows, length)
    grid = (triton.cdiv(rows, rows_per_program),)
    launch_triton(row_kernel, grid, *operands, DOT=b is not None, R=rows_per_program)
    return y.cpu()


@pytest.mark.parametrize("length", hard_cases.LENGTHS)
def test_chunk_sum_hard_rows_equals_golden(length: int) -> None:
    terms = hard_cases.rows(length)
    assert_same_bits(in_triton(terms, None, 8), golden.row_sum(terms))


@pytest.mark.parametrize("length", hard_cases.LENGTHS)
def test_chunk_dot_hard_rows_equals_golden(length: int) -> None:
    a, b = hard_cases.rows(length), hard_cases.rows(length, seed=1)
    assert_same_bits(in_triton(a, b, 8), golden.row_dot(a, b))


@pytest.mark.parametrize("length", hard_cases.LENGTHS)
def test_whole_rows_hard_rows_equal_golden(length: int) -> None:
    a, b = hard_cases.rows(length), hard_cases.rows(length, seed=1)
    width = max(8, triton.next_power_of_2(length))
    for padded in (width, 2 * width):
        assert_same_bits(whole_in_triton(a, None, padded), golden.row_sum(a))
        assert_same_bits(whole_in_triton(a, b, padded), golden.row_dot(a, b))


@pytest.mark.parametrize("rows_per_program", [1, 2, 16])
def test_chunk_sums_rows_per_program_do_not_change_bits(rows_per_program: int) -> None:
    terms = hard_cases.rows(257)
    assert_same_bits(in_triton(terms, None, rows_per_program), golden.row_sum(terms))
    assert_same_bits(in_triton(terms, terms, rows_per_program), golden.row_dot(terms, terms))


@pytest.mark.parametrize("name", hard_cases.known_sums())
def test_chunk_sums_known_row_gives_known_sum(name: str) -> None:
    terms, expected = hard_cases.known_sums()[name]
    assert_same_bits(in_triton(terms, None, 1), torch.tensor([expected]))
    assert_same_bits(in_triton(terms, torch.ones_like(terms), 1), torch.tensor([expected]))
