# SPDX-License-Identifier: Apache-2.0
"""Exact column sums as Triton kernels of their own."""

import torch
import triton
import triton.language as tl

from rlk.launch import launch_triton
from rlk.reduce.exact_sum.device_triton import add_block, normalise_limbs, round_limbs
from rlk.reduce.exact_sum.golden import FORMATS, new

# 128 rows share the atomics of a block; 32 columns of BF16 are two full memory sectors.
ROWS = 128
COLUMNS = 32
# 128: columns per program where a program owns them, one a thread; 512 where there are many and
# one program more or less is no matter.
OWNED_COLUMNS = 128
MANY_COLUMNS = 1 << 12
MANY_OWNED_COLUMNS = 512


@triton.jit
def add_rows_kernel(
    state_ptr,
    rows_ptr,
    row_count,
    columns,
    row_stride,
    column_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One block [ROWS, COLUMNS] of rows into the state, which may be left unnormalised."""
    program = tl.program_id(0)
    column_blocks = tl.cdiv(columns, COLUMNS)
    row = (program // column_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (program % column_blocks).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < row_count)[:, None] & (column < columns)[None, :]
    at = rows_ptr + row[:, None] * row_stride + column[None, :] * column_stride
    c = tl.load(at, mask=mask, other=0).to(tl.float32)  # [ROWS, COLUMNS]
    add_block(state_ptr, column, columns, c, mask)


@triton.jit
def normalise_kernel(state_ptr, columns, COLUMNS: tl.constexpr):
    """Carry in the columns that the program owns."""
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    normalise_limbs(state_ptr, column, columns, column < columns)


@triton.jit
def round_kernel(
    out_ptr,
    state_ptr,
    columns,
    PRECISION: tl.constexpr,
    LOWEST_BIT: tl.constexpr,
    INFINITY: tl.constexpr,
    SIGN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The rounded sums as bit patterns, stored as integers of the destination's width."""
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < columns
    bits = round_limbs(state_ptr, column, columns, mask, PRECISION, LOWEST_BIT, INFINITY, SIGN)
    tl.store(out_ptr + column, bits.to(out_ptr.dtype.element_ty), mask=mask)


def add_rows(state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The normalised state after adding rows [R, C] of FP32, BF16 or FP16."""
    # Normalised first, so that the limbs have room for a launch's pieces.
    return _add_rows_(normalise(state), rows)


def sum_rows(rows: torch.Tensor) -> torch.Tensor:
    """The normalised state of rows [R, C] alone."""
    return _add_rows_(new(rows.shape[1], rows.device), rows)


def _add_rows_(state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Add rows to a contiguous and normalised state where it lies."""
    row_count, columns = rows.shape
    grid = (triton.cdiv(row_count, ROWS) * triton.cdiv(columns, COLUMNS),)
    shape = (row_count, columns, *rows.stride())
    launch_triton(add_rows_kernel, grid, state, rows, *shape, ROWS=ROWS, COLUMNS=COLUMNS)
    return normalise_(state)


def merge(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The normalised state of the rows of both."""
    return normalise_((a + b).contiguous())


def normalise(state: torch.Tensor) -> torch.Tensor:
    """The same sum with digits in [0, 2^32) below the signed top limb."""
    return normalise_(state.clone(memory_format=torch.contiguous_format))


def normalise_(state: torch.Tensor) -> torch.Tensor:
    """Normalise a contiguous state where it lies, as after a kernel that used `add_block`."""
    columns = state.shape[1]
    grid = (triton.cdiv(columns, OWNED_COLUMNS),)
    launch_triton(normalise_kernel, grid, state, columns, COLUMNS=OWNED_COLUMNS)
    return state


def round(state: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum rounded once, to nearest even, from the limbs to `dtype`."""
    out = torch.empty(state.shape[1], dtype=dtype, device=state.device)
    return round_into(out, state.contiguous())


def round_into(out: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """`round` of a contiguous state, into contiguous memory of its dtype."""
    form = FORMATS[out.dtype]
    columns = state.shape[1]
    owned = OWNED_COLUMNS if columns < MANY_COLUMNS else MANY_OWNED_COLUMNS
    grid = (triton.cdiv(columns, owned),)
    launch_triton(
        round_kernel,
        grid,
        out.view(form.storage),
        state,
        columns,
        PRECISION=form.precision,
        LOWEST_BIT=form.lowest_bit,
        INFINITY=form.infinity,
        SIGN=form.sign,
        COLUMNS=owned,
    )
    return out
