# SPDX-License-Identifier: Apache-2.0
"""rms_norm in Triton: one pass forward, one fused pass backward, same bits as golden."""

from typing import Any

import torch
import triton
import triton.language as tl

from rlk.launch import launch_triton, multiprocessors
from rlk.math.device_triton import divide
from rlk.reduce import exact_sum
from rlk.reduce.exact_sum.device_triton import (
    MAX_TERMS,
    add_block,
    add_levels,
    add_terms,
    no_terms,
    takes,
    window,
)
from rlk.reduce.exact_sum.kernel_triton import normalise_
from rlk.reduce.row_sum.device_triton import chunk_dot, row_dot

from .device_triton import (
    CHUNK,
    ROWS,
    forward_rows,
    input_gradient,
    load_chunk,
    load_rows,
    load_xhat,
    normalised,
    offset_weight,
    row_mean,
    store_chunk,
    store_rows,
)

# 4096: columns of the widest rows that a program holds in registers.
WIDEST = 4096
# 256: columns of a warp, 16 bytes of BF16 a thread. It has two FP64 registers for each level then.
WARP_COLUMNS = 256
# 16: warps of a multiprocessor that the registers of these kernels leave room for.
BACKWARD_WARPS = 16
# 4 stages: three more blocks are on their way while one is computed.
BACKWARD_STAGES = 4


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
def backward_chunks(
    dy, dresidual_out, x, weight, rstd_in, dx, state, rows, n,
    dy_row, dy_column, dresidual_row, dresidual_column, x_row, x_column, weight_column, rstd_row,
    weight_offset,
    RESIDUAL: tl.constexpr, NEED_X: tl.constexpr, NEED_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The backward of a program's rows, chunk by chunk."""
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


@triton.jit
def weight_terms(
    dy, x, rstd_in, block, rows, n, dy_row, dy_column, x_row, x_column, rstd_row,
    FULL: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Terms of dweight of a block of whole rows, zero beyond them."""
    row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)  # [R]
    mask = row < rows
    rstd = tl.load(rstd_in + row * rstd_row, mask=mask, other=0.0)
    upstream = load_rows(dy, row, mask, n, dy_row, dy_column, FULL, WIDTH)
    values = load_rows(x, row, mask, n, x_row, x_column, FULL, WIDTH)
    return upstream * normalised(values, rstd, n, FULL)


@triton.jit
def backward_blocks(
    dy, dresidual_out, x, weight, rstd_in, dx, state, rows, n,
    dy_row, dy_column, dresidual_row, dresidual_column, x_row, x_column, weight_column, rstd_row,
    weight_offset,
    RESIDUAL: tl.constexpr, NEED_X: tl.constexpr, NEED_WEIGHT: tl.constexpr,
    FULL: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The backward of a program's blocks of whole rows."""
    columns = tl.arange(0, WIDTH)
    factor = offset_weight(weight, weight_offset, 0, n, weight_column, WIDTH)[None, :]
    if NEED_WEIGHT:
        seen = weight_terms(
            dy, x, rstd_in, tl.program_id(0), rows, n,
            dy_row, dy_column, x_row, x_column, rstd_row, FULL, ROWS, WIDTH,
        )  # fmt: skip
        unit = window(seen)
        upper, lower, missed = no_terms(ROWS, WIDTH)
    blocks = tl.cdiv(rows, ROWS)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)  # [R]
        mask = row < rows
        rstd = tl.load(rstd_in + row * rstd_row, mask=mask, other=0.0)
        upstream = load_rows(dy, row, mask, n, dy_row, dy_column, FULL, WIDTH)
        xhat = normalised(load_rows(x, row, mask, n, x_row, x_column, FULL, WIDTH), rstd, n, FULL)
        if NEED_X:
            g = upstream * factor
            m = row_mean(row_dot(g, xhat), n, FULL, WIDTH)
            gradient = input_gradient(g, xhat, rstd, m)
            if RESIDUAL:
                gradient = gradient + load_rows(
                    dresidual_out, row, mask, n, dresidual_row, dresidual_column, FULL, WIDTH
                )
            store_rows(dx, gradient, row, mask, n, FULL, WIDTH)
        if NEED_WEIGHT:
            upper, lower, missed = add_terms(upper, lower, missed, upstream * xhat, unit)
    if NEED_WEIGHT:
        add_levels(state, columns, n, upper, lower, unit)
        if tl.max(missed) > 0:
            for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
                terms = weight_terms(
                    dy, x, rstd_in, block, rows, n,
                    dy_row, dy_column, x_row, x_column, rstd_row, FULL, ROWS, WIDTH,
                )  # fmt: skip
                add_block(state, columns, n, terms, ~takes(terms, unit))


@triton.jit
def rms_norm_backward(
    dy, dresidual_out, x, weight, rstd_in, dx, state, rows, n,
    dy_row, dy_column, dresidual_row, dresidual_column, x_row, x_column, weight_column, rstd_row,
    weight_offset,
    RESIDUAL: tl.constexpr, NEED_X: tl.constexpr, NEED_WEIGHT: tl.constexpr,
    WHOLE: tl.constexpr, FULL: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if WHOLE:
        backward_blocks(
            dy, dresidual_out, x, weight, rstd_in, dx, state, rows, n,
            dy_row, dy_column, dresidual_row, dresidual_column, x_row, x_column, weight_column,
            rstd_row, weight_offset, RESIDUAL, NEED_X, NEED_WEIGHT, FULL, ROWS, COLUMNS, STAGES,
        )  # fmt: skip
    else:
        backward_chunks(
            dy, dresidual_out, x, weight, rstd_in, dx, state, rows, n,
            dy_row, dy_column, dresidual_row, dresidual_column, x_row, x_column, weight_column,
            rstd_row, weight_offset, RESIDUAL, NEED_X, NEED_WEIGHT, ROWS, COLUMNS,
        )  # fmt: skip


def blocking(
    x: torch.Tensor, resident_warps: int, stages: int
) -> tuple[tuple[int], dict[str, Any]]:
    """(grid, meta) of a kernel on the rows of x, of which a multiprocessor holds so many warps."""
    rows, n = x.shape
    if n > WIDEST:
        meta = {"WHOLE": False, "FULL": False, "STAGES": 1, "ROWS": ROWS, "COLUMNS": CHUNK}
        return (triton.cdiv(rows, ROWS),), meta
    width = max(8, triton.next_power_of_2(n))
    warps = min(max(width // WARP_COLUMNS, 4), 16)
    height = max(1, warps * WARP_COLUMNS // width)
    blocks = triton.cdiv(rows, height)
    resident = multiprocessors(x.device) * resident_warps // warps
    # Levels of exact sums have room for so many blocks.
    grid = max(min(blocks, resident), triton.cdiv(blocks, MAX_TERMS.value))
    meta = {"WHOLE": True, "FULL": n == width, "STAGES": stages, "ROWS": height, "COLUMNS": width}
    # 2048: 65536 registers of a multiprocessor over the 32 threads of a warp.
    return (grid,), meta | {"num_warps": warps, "maxnreg": 2048 // resident_warps}


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
    grid, meta = blocking(x, BACKWARD_WARPS, BACKWARD_STAGES)
    launch_triton(
        rms_norm_backward, grid,
        dy, added, x, weight, rstd, x if dx is None else dx, rstd if state is None else state,
        rows, n, *dy.stride(), *added.stride(), *x.stride(), *weight.stride(), *rstd.stride(),
        weight_offset,
        RESIDUAL=dresidual_out is not None, NEED_X=need_x, NEED_WEIGHT=need_weight, **meta,
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
