# SPDX-License-Identifier: Apache-2.0
"""demo in Triton: the steps of golden.py, under the same names."""

import torch
import triton
import triton.language as tl

from rlk.launch import launch_triton
from rlk.math.device_triton import divide
from rlk.reduce import exact_sum
from rlk.reduce.exact_sum.device_triton import add_block
from rlk.reduce.exact_sum.kernel_triton import normalise_
from rlk.reduce.row_sum.device_triton import chunk_dot

# 16: rows of one program. A constant, never a function of the row count.
ROWS = 16
# 256: columns of one step of row_sum.
CHUNK = 256


@triton.jit
def load_rows(base, offsets, row_mask, columns, n, stride):
    """FP32 [R, CHUNK], zero beyond the row or the batch."""
    mask = row_mask[:, None] & (columns < n)[None, :]
    address = base + offsets[:, None] + columns.to(tl.int64)[None, :] * stride
    return tl.load(address, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_weight(weight, columns, n, stride):
    """FP32 [1, CHUNK]"""
    address = weight + columns.to(tl.int64) * stride
    return tl.load(address, mask=columns < n, other=0.0).to(tl.float32)[None, :]


@triton.jit
def row_damping(x, offsets, mask, n, stride, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """1 / (1 + sum(x^2) / N)  [R]"""
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, n, CHUNK):
        values = load_rows(x, offsets, mask, start + tl.arange(0, CHUNK), n, stride)
        total = total + chunk_dot(values, values)
    one = tl.full([ROWS], 1.0, tl.float32)
    return divide(one, one + divide(total, tl.zeros([ROWS], tl.float32) + n))


@triton.jit
def demo_forward(
    x, weight, y, damping_out, rows, n, x_row, x_column, weight_column,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [R]
    mask = row < rows
    damping = row_damping(x, row * x_row, mask, n, x_column, ROWS, CHUNK)
    tl.store(damping_out + row, damping, mask=mask)
    for start in range(0, n, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        xhat = load_rows(x, row * x_row, mask, columns, n, x_column) * damping[:, None]
        result = xhat * load_weight(weight, columns, n, weight_column)
        inside = mask[:, None] & (columns < n)[None, :]
        tl.store(y + row[:, None] * n + columns, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def demo_backward(
    dy, x, weight, damping_in, dx, state, rows, n,
    dy_row, dy_column, x_row, x_column, weight_column, damping_row,
    NEED_X: tl.constexpr, NEED_WEIGHT: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [R]
    mask = row < rows
    damping = tl.load(damping_in + row * damping_row, mask=mask, other=0.0)
    m = tl.zeros([ROWS], tl.float32)
    if NEED_X:
        for start in range(0, n, CHUNK):
            columns = start + tl.arange(0, CHUNK)
            upstream = load_rows(dy, row * dy_row, mask, columns, n, dy_column)
            xhat = load_rows(x, row * x_row, mask, columns, n, x_column) * damping[:, None]
            m = m + chunk_dot(upstream * load_weight(weight, columns, n, weight_column), xhat)
        m = divide(m, tl.zeros([ROWS], tl.float32) + n)
    for start in range(0, n, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        inside = mask[:, None] & (columns < n)[None, :]
        upstream = load_rows(dy, row * dy_row, mask, columns, n, dy_column)
        xhat = load_rows(x, row * x_row, mask, columns, n, x_column) * damping[:, None]
        if NEED_X:
            g = upstream * load_weight(weight, columns, n, weight_column)
            result = damping[:, None] * g - xhat * (m + m)[:, None]
            tl.store(dx + row[:, None] * n + columns, result.to(dx.dtype.element_ty), mask=inside)
        if NEED_WEIGHT:
            add_block(state, columns, n, upstream * xhat, inside)


def forward(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [T, N], damping [T])"""
    rows, n = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    damping = torch.empty(rows, dtype=torch.float32, device=x.device)
    launch_triton(
        demo_forward, (triton.cdiv(rows, ROWS),),
        x, weight, y, damping, rows, n, *x.stride(), *weight.stride(), ROWS=ROWS, CHUNK=CHUNK,
    )  # fmt: skip
    return y, damping


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    damping: torch.Tensor,
    *,
    needs: frozenset[str],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx [T, N], exact state of dweight [13, N])"""
    rows, n = x.shape
    need_x, need_weight = "x" in needs, "weight" in needs
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else None
    state = exact_sum.new(n, x.device) if need_weight else None
    launch_triton(
        demo_backward, (triton.cdiv(rows, ROWS),),
        dy, x, weight, damping, x if dx is None else dx, damping if state is None else state,
        rows, n, *dy.stride(), *x.stride(), *weight.stride(), *damping.stride(),
        NEED_X=need_x, NEED_WEIGHT=need_weight, ROWS=ROWS, CHUNK=CHUNK,
    )  # fmt: skip
    if state is not None:
        normalise_(state)
    return dx, state
