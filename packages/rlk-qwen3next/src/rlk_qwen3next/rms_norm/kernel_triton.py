# SPDX-License-Identifier: Apache-2.0
"""rms_norm in Triton: one pass forward, one fused pass backward, same bits as golden."""

import torch
import triton
import triton.language as tl

from rlk.launch import launch_triton
from rlk.math.device_triton import divide
from rlk.reduce import exact_sum
from rlk.reduce.exact_sum.device_triton import add_block
from rlk.reduce.exact_sum.kernel_triton import normalise_
from rlk.reduce.row_sum.device_triton import chunk_dot

from .device_triton import (
    CHUNK,
    ROWS,
    input_gradient,
    inverse_rms,
    load_chunk,
    load_xhat,
    offset_weight,
    store_chunk,
)


@triton.jit
def rms_norm_forward(
    x, weight, y, rstd_out, rows, n, x_row, x_column, weight_column, eps, weight_offset,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [R]
    mask = row < rows
    rstd = inverse_rms(x, row * x_row, mask, n, x_column, eps, ROWS, CHUNK)
    tl.store(rstd_out + row, rstd, mask=mask)
    for start in range(0, n, CHUNK):
        values = load_chunk(x, row * x_row, mask, start, n, x_column, CHUNK)
        factor = offset_weight(weight, weight_offset, start, n, weight_column, CHUNK)
        result = values * rstd[:, None] * factor[None, :]
        store_chunk(y, result, row, mask, start, n, CHUNK)


@triton.jit
def rms_norm_backward(
    dy, x, weight, rstd_in, dx, state, rows, n,
    dy_row, dy_column, x_row, x_column, weight_column, rstd_row, weight_offset,
    NEED_X: tl.constexpr, NEED_WEIGHT: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [R]
    mask = row < rows
    rstd = tl.load(rstd_in + row * rstd_row, mask=mask, other=0.0)
    m = tl.zeros([ROWS], tl.float32)
    if NEED_X:
        for start in range(0, n, CHUNK):
            upstream = load_chunk(dy, row * dy_row, mask, start, n, dy_column, CHUNK)
            xhat = load_xhat(x, row * x_row, mask, start, n, x_column, rstd, CHUNK)
            factor = offset_weight(weight, weight_offset, start, n, weight_column, CHUNK)
            m = m + chunk_dot(upstream * factor[None, :], xhat)
        m = divide(m, tl.zeros([ROWS], tl.float32) + n)
    for start in range(0, n, CHUNK):
        upstream = load_chunk(dy, row * dy_row, mask, start, n, dy_column, CHUNK)
        xhat = load_xhat(x, row * x_row, mask, start, n, x_column, rstd, CHUNK)
        if NEED_X:
            factor = offset_weight(weight, weight_offset, start, n, weight_column, CHUNK)
            gradient = input_gradient(upstream * factor[None, :], xhat, rstd, m)
            store_chunk(dx, gradient, row, mask, start, n, CHUNK)
        if NEED_WEIGHT:
            columns = start + tl.arange(0, CHUNK)
            inside = mask[:, None] & (columns < n)[None, :]
            add_block(state, columns, n, upstream * xhat, inside)


def forward(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, weight_offset: float, rounding: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [T, N], rstd [T])"""
    rows, n = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    launch_triton(
        rms_norm_forward, (triton.cdiv(rows, ROWS),),
        x, weight, y, rstd, rows, n, *x.stride(), *weight.stride(), eps, weight_offset,
        ROWS=ROWS, CHUNK=CHUNK,
    )  # fmt: skip
    return y, rstd


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    *,
    eps: float,
    weight_offset: float,
    rounding: str,
    needs: frozenset[str],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx [T, N], exact state of dweight [13, N])"""
    rows, n = x.shape
    need_x, need_weight = "x" in needs, "weight" in needs
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else None
    state = exact_sum.new(n, x.device) if need_weight else None
    launch_triton(
        rms_norm_backward, (triton.cdiv(rows, ROWS),),
        dy, x, weight, rstd, x if dx is None else dx, rstd if state is None else state, rows, n,
        *dy.stride(), *x.stride(), *weight.stride(), *rstd.stride(), weight_offset,
        NEED_X=need_x, NEED_WEIGHT=need_weight, ROWS=ROWS, CHUNK=CHUNK,
    )  # fmt: skip
    if state is not None:
        normalise_(state)
    return dx, state
