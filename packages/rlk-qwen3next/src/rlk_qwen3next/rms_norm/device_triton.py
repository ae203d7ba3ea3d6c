# SPDX-License-Identifier: Apache-2.0
"""What every RMS norm kernel calls: addresses, rstd and the weight. Steps named as in golden."""

import triton
import triton.language as tl

from rlk.math.device_triton import divide, hardware_rsqrt, reciprocal, sqrt
from rlk.reduce.row_sum.device_triton import chunk_dot

# 16: rows of a program that goes chunk by chunk. A constant, never a function of the row count.
ROWS = 16
# 256: columns of one step of row_sum.
CHUNK = 256


@triton.jit
def load_chunk(base, row_offsets, row_mask, start, n, stride, CHUNK: tl.constexpr):
    """FP32 values [R, CHUNK] of rows at `row_offsets`, zero beyond the row or the batch."""
    columns = start + tl.arange(0, CHUNK)
    mask = row_mask[:, None] & (columns < n)[None, :]
    offsets = row_offsets[:, None] + columns.to(tl.int64)[None, :] * stride
    return tl.load(base + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_xhat(x, row_offsets, row_mask, start, n, stride, rstd, CHUNK: tl.constexpr):
    """x * rstd [R, CHUNK], zero beyond the row, where an infinite rstd would make 0 a NaN."""
    columns = start + tl.arange(0, CHUNK)
    values = load_chunk(x, row_offsets, row_mask, start, n, stride, CHUNK)
    return tl.where((columns < n)[None, :], values * rstd[:, None], 0.0)


@triton.jit
def store_chunk(base, values, row_index, row_mask, start, n, CHUNK: tl.constexpr):
    """Store [R, CHUNK] into a contiguous [T, N] output, rounded once to its dtype."""
    columns = start + tl.arange(0, CHUNK)
    mask = row_mask[:, None] & (columns < n)[None, :]
    offsets = row_index[:, None] * n + columns.to(tl.int64)[None, :]
    tl.store(base + offsets, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_sum(
    x, x_rows, x_column, residual, residual_rows, residual_column, row_mask, start, n,
    RESIDUAL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """What a norm reads [R, CHUNK]: x, or with RESIDUAL x + residual rounded to their dtype."""
    values = load_chunk(x, x_rows, row_mask, start, n, x_column, CHUNK)
    if RESIDUAL:
        other = load_chunk(residual, residual_rows, row_mask, start, n, residual_column, CHUNK)
        values = (values + other).to(x.dtype.element_ty).to(tl.float32)
    return values


@triton.jit
def inverse_root(mean_square, eps, HARDWARE: tl.constexpr):
    """rstd of mean squares [R].

    HARDWARE takes the GPU's own reciprocal root in place of a root and a division.
    """
    if HARDWARE:
        rstd = hardware_rsqrt(mean_square + eps)
    else:
        rstd = reciprocal(sqrt(mean_square + eps))
    return rstd


@triton.jit
def inverse_rms_of_sum(
    x, x_rows, x_column, residual, residual_rows, residual_column, row_mask, n, eps,
    RESIDUAL: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """rstd [R] of rows chunk by chunk."""
    total = tl.zeros([ROWS], tl.float32)
    # ORDER: chunks of 256 ascending along N
    for start in range(0, n, CHUNK):
        values = load_sum(
            x, x_rows, x_column, residual, residual_rows, residual_column, row_mask, start, n,
            RESIDUAL, CHUNK,
        )  # fmt: skip
        total = total + chunk_dot(values, values)
    return inverse_root(row_mean(total, n, False, CHUNK), eps, HARDWARE)


@triton.jit
def inverse_rms(x, x_rows, row_mask, n, x_column, eps, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """rstd [R] of rows as they are, by IEEE operations."""
    return inverse_rms_of_sum(
        x, x_rows, x_column, x, x_rows, x_column, row_mask, n, eps, False, False, ROWS, CHUNK
    )


@triton.jit
def forward_rows(
    x, residual, weight, y, residual_out, rstd_out, rows, n,
    x_row, x_column, residual_row, residual_column, weight_column, eps, weight_offset,
    RESIDUAL: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The forward of a program's rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [R]
    mask = row < rows
    x_rows, residual_rows = row * x_row, row * residual_row
    rstd = inverse_rms_of_sum(
        x, x_rows, x_column, residual, residual_rows, residual_column, mask, n, eps,
        RESIDUAL, HARDWARE, ROWS, CHUNK,
    )  # fmt: skip
    tl.store(rstd_out + row, rstd, mask=mask)
    for start in range(0, n, CHUNK):
        values = load_sum(
            x, x_rows, x_column, residual, residual_rows, residual_column, mask, start, n,
            RESIDUAL, CHUNK,
        )  # fmt: skip
        if RESIDUAL:
            store_chunk(residual_out, values, row, mask, start, n, CHUNK)
        factor = offset_weight(weight, weight_offset, start, n, weight_column, CHUNK)
        result = values * rstd[:, None] * factor[None, :]
        store_chunk(y, result, row, mask, start, n, CHUNK)


@triton.jit
def offset_weight(weight, weight_offset, start, n, stride, CHUNK: tl.constexpr):
    """FP32 weight plus offset [CHUNK]; an offset of 0 adds nothing, so -0.0 keeps its sign."""
    columns = start + tl.arange(0, CHUNK)
    values = tl.load(weight + columns.to(tl.int64) * stride, mask=columns < n, other=0.0)
    values = values.to(tl.float32)
    # A GPU receives the offset in FP32; the interpreter passes it in FP64.
    offset = tl.full([CHUNK], weight_offset, tl.float32)
    return tl.where(offset == 0.0, values, offset + values)


@triton.jit
def input_gradient(g, xhat, rstd, m):
    """dx = rstd * (g - xhat * m) of [R, CHUNK]."""
    return rstd[:, None] * (g - xhat * m[:, None])


@triton.jit
def load_rows(base, row, row_mask, n, row_stride, stride, FULL: tl.constexpr, WIDTH: tl.constexpr):
    """FP32 values [R, WIDTH] of whole rows, zero beyond the row or the batch.

    FULL says that WIDTH is the size of a row.
    """
    columns = tl.arange(0, WIDTH)
    mask = row_mask[:, None]
    if not FULL:
        mask = mask & (columns < n)[None, :]
    offsets = (row * row_stride)[:, None] + columns.to(tl.int64)[None, :] * stride
    return tl.load(base + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_rows(base, values, row, row_mask, n, FULL: tl.constexpr, WIDTH: tl.constexpr):
    """Store whole rows [R, WIDTH] into a contiguous [T, N] output, rounded once to its dtype."""
    columns = tl.arange(0, WIDTH)
    mask = row_mask[:, None]
    if not FULL:
        mask = mask & (columns < n)[None, :]
    offsets = (row * n)[:, None] + columns.to(tl.int64)[None, :]
    tl.store(base + offsets, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def normalised(values, rstd, n, FULL: tl.constexpr):
    """x * rstd of whole rows, zero beyond the row, where an infinite rstd would make 0 a NaN."""
    xhat = values * rstd[:, None]
    if not FULL:
        xhat = tl.where((tl.arange(0, values.shape[1]) < n)[None, :], xhat, 0.0)
    return xhat


@triton.jit
def row_mean(total, n, FULL: tl.constexpr, WIDTH: tl.constexpr):
    """total / n. FULL rows have a power of two of columns, whose inverse is exact: the product is
    the same real number as the quotient, so it rounds to the same bits."""
    if FULL:
        mean = total * (1.0 / WIDTH)
    else:
        mean = divide(total, tl.zeros_like(total) + n)
    return mean
