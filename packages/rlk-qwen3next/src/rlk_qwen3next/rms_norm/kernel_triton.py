# SPDX-License-Identifier: Apache-2.0
"""rms_norm in Triton: one pass forward, one fused pass backward, same bits as golden."""

from typing import Any

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
    forward_rows,
    input_gradient,
    load_chunk,
    load_xhat,
    offset_weight,
    store_chunk,
)


@triton.jit
def rms_norm_forward(
    x, residual, weight, y, residual_out, rstd_out, rows, n,
    x_row, x_column, residual_row, residual_column, weight_column, eps, weight_offset,
    RESIDUAL: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    forward_rows(
        x, residual, weight, y, residual_out, rstd_out, rows, n,
        x_row, x_column, residual_row, residual_column, weight_column, eps, weight_offset,
        RESIDUAL, False, ROWS, CHUNK,
    )  # fmt: skip


@triton.jit
def rms_norm_backward(
    dy, dresidual_out, x, weight, rstd_in, dx, state, rows, n,
    dy_row, dy_column, dresidual_row, dresidual_column, x_row, x_column, weight_column, rstd_row,
    weight_offset,
    RESIDUAL: tl.constexpr, NEED_X: tl.constexpr, NEED_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
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
            if RESIDUAL:
                gradient = gradient + load_chunk(
                    dresidual_out, row * dresidual_row, mask, start, n, dresidual_column, CHUNK
                )
            store_chunk(dx, gradient, row, mask, start, n, CHUNK)
        if NEED_WEIGHT:
            columns = start + tl.arange(0, CHUNK)
            inside = mask[:, None] & (columns < n)[None, :]
            add_block(state, columns, n, upstream * xhat, inside)


def run_forward(
    kernel: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y [T, N], what the norm read [T, N], rstd [T]) by one launch of a forward kernel."""
    rows, n = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    added = x if residual is None else residual
    residual_out = x if residual is None else torch.empty_like(y)
    launch_triton(
        kernel, (triton.cdiv(rows, ROWS),),
        x, added, weight, y, residual_out, rstd, rows, n,
        *x.stride(), *added.stride(), *weight.stride(), eps, weight_offset,
        RESIDUAL=residual is not None, ROWS=ROWS, CHUNK=CHUNK,
    )  # fmt: skip
    return y, residual_out, rstd


def run_backward(
    dy: torch.Tensor,
    dresidual_out: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    weight_offset: float,
    needs: frozenset[str],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx [T, N], exact state of dweight [13, N]); x is what the norm read."""
    rows, n = x.shape
    need_x, need_weight = "x" in needs, "weight" in needs
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else None
    state = exact_sum.new(n, x.device) if need_weight else None
    added = dy if dresidual_out is None else dresidual_out
    launch_triton(
        rms_norm_backward, (triton.cdiv(rows, ROWS),),
        dy, added, x, weight, rstd, x if dx is None else dx, rstd if state is None else state,
        rows, n, *dy.stride(), *added.stride(), *x.stride(), *weight.stride(), *rstd.stride(),
        weight_offset,
        RESIDUAL=dresidual_out is not None, NEED_X=need_x, NEED_WEIGHT=need_weight,
        ROWS=ROWS, CHUNK=CHUNK,
    )  # fmt: skip
    if state is not None:
        normalise_(state)
    return dx, state


def forward(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, weight_offset: float, rounding: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [T, N], rstd [T])"""
    y, _, rstd = run_forward(rms_norm_forward, x, None, weight, eps, weight_offset)
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
    return run_backward(dy, None, x, weight, rstd, weight_offset, needs)
