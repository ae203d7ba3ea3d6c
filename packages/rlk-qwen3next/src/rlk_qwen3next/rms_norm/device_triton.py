# SPDX-License-Identifier: Apache-2.0
"""What every RMS norm kernel calls: addresses, rstd and the weight. Steps named as in golden."""

import triton
import triton.language as tl

from rlk.math.device_triton import divide, sqrt
from rlk.reduce.row_sum.device_triton import chunk_dot

# 16: rows of one program. A constant, never a function of the row count.
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
def inverse_rms(x, x_rows, row_mask, n, x_column, eps, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """rstd [R]: the one piece of code every RMS norm takes it from."""
    total = tl.zeros([ROWS], tl.float32)
    # ORDER: chunks of 256 ascending along N
    for start in range(0, n, CHUNK):
        values = load_chunk(x, x_rows, row_mask, start, n, x_column, CHUNK)
        total = total + chunk_dot(values, values)
    mean_square = divide(total, tl.zeros([ROWS], tl.float32) + n)
    root = sqrt(mean_square + eps)
    return divide(tl.full([ROWS], 1.0, tl.float32), root)


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
