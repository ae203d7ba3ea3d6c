# SPDX-License-Identifier: Apache-2.0
"""What the kernels call: addresses, statistics, and steps of each element, named as in golden."""

import triton
import triton.language as tl

from rlk.math.device_triton import divide, sqrt
from rlk.reduce.row_sum.device_triton import chunk_dot, chunk_sum

# 4: tokens of one program, one a warp, so that a few thousand of them fill a GPU. A constant, never
# a function of their number.
ROWS = 4
# 256: columns of one step of row_sum.
CHUNK = 256


@triton.jit
def token_rows(row, tokens, sample_stride, token_stride):
    """Where tokens [R], numbered over all samples, begin."""
    return row // tokens * sample_stride + row % tokens * token_stride


@triton.jit
def load_chunk(
    base, row_offsets, row_mask, start, n, stride, CHUNK: tl.constexpr, FULL: tl.constexpr = False
):
    """FP32 values [R, CHUNK] of rows at `row_offsets`, zero beyond the row or the batch.

    FULL says that no chunk is beyond the row.
    """
    columns = start + tl.arange(0, CHUNK)
    mask = row_mask[:, None]
    if not FULL:
        mask = mask & (columns < n)[None, :]
    offsets = row_offsets[:, None] + columns.to(tl.int64)[None, :] * stride
    return tl.load(base + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_chunk(base, values, row_index, row_mask, start, n, CHUNK: tl.constexpr):
    """Store [R, CHUNK] into contiguous rows, rounded once to their dtype."""
    columns = start + tl.arange(0, CHUNK)
    mask = row_mask[:, None] & (columns < n)[None, :]
    offsets = row_index[:, None] * n + columns.to(tl.int64)[None, :]
    tl.store(base + offsets, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def row_mean(total, n):
    """total / N of row sums [R]."""
    return divide(total, tl.zeros_like(total) + n)


@triton.jit
def centre(values, mean, start, n):
    """x - mean [R, CHUNK], zero beyond the row, where 0 - mean would be a term."""
    columns = start + tl.arange(0, values.shape[1])
    return tl.where((columns < n)[None, :], values - mean[:, None], 0.0)


@triton.jit
def normalise(values, mean, rstd, start, n, FULL: tl.constexpr = False):
    """(x - mean) * rstd [R, CHUNK], zero beyond the row, where an infinite rstd would make NaN."""
    xhat = (values - mean[:, None]) * rstd[:, None]
    if not FULL:
        columns = start + tl.arange(0, values.shape[1])
        xhat = tl.where((columns < n)[None, :], xhat, 0.0)
    return xhat


@triton.jit
def inverse_root(squares, n, eps):
    """rstd [R] of sums of squares."""
    root = sqrt(row_mean(squares, n) + eps)
    return divide(tl.zeros_like(root) + 1.0, root)


@triton.jit
def statistics(x, rows, mask, n, column_stride, eps, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """(mean [R], rstd [R])"""
    total = tl.zeros([ROWS], tl.float32)
    # ORDER: chunks of 256 ascending along N
    for start in range(0, n, CHUNK):
        total = total + chunk_sum(load_chunk(x, rows, mask, start, n, column_stride, CHUNK))
    mean = row_mean(total, n)
    squares = tl.zeros([ROWS], tl.float32)
    # ORDER: the same
    for start in range(0, n, CHUNK):
        values = load_chunk(x, rows, mask, start, n, column_stride, CHUNK)
        centred = centre(values, mean, start, n)
        squares = squares + chunk_dot(centred, centred)
    return mean, inverse_root(squares, n, eps)


@triton.jit
def modulate(xhat, scale, shift):
    """xhat * (1 + scale) + shift of [R, CHUNK], each step rounded."""
    return xhat * (1.0 + scale) + shift


@triton.jit
def input_gradient(g, xhat, rstd, m1, m2):
    """dx = rstd * ((g - m1) - xhat * m2) of [R, CHUNK]."""
    return rstd[:, None] * ((g - m1[:, None]) - xhat * m2[:, None])
