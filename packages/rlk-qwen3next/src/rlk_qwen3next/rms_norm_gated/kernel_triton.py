# SPDX-License-Identifier: Apache-2.0
"""rms_norm_gated in Triton: one pass forward, one fused pass backward, same bits as golden.

check_ptx: allow rcp.approx.ftz.f32 (`reciprocals` rounds it correctly)
"""

import torch
import triton
import triton.language as tl

from rlk.launch import launch_triton
from rlk.math.device_triton import (
    divide,
    sigmoid,
    sigmoid_derivative,
    silu,
    silu_derivative,
)
from rlk.reduce import exact_sum
from rlk.reduce.exact_sum.device_triton import (
    add_block,
    add_levels,
    add_terms,
    no_terms,
    takes,
    window,
)
from rlk.reduce.exact_sum.kernel_triton import normalise_
from rlk.reduce.row_sum.device_triton import chunk_dot, row_dot

from ..rms_norm.device_triton import (
    input_gradient,
    inverse_rms,
    inverse_root,
    load_chunk,
    load_rows,
    load_xhat,
    normalised,
    offset_weight,
    row_mean,
    store_chunk,
    store_rows,
)
from ..rms_norm.kernel_triton import BACKWARD_WARPS, blocking
from ..rms_norm.kernel_triton import weight_terms as ungated_terms

# 32: warps of a multiprocessor that the registers of the forward leave room for.
FORWARD_WARPS = 32
# 3 stages: two more blocks are on their way while one is computed.
STAGES = 3


@triton.jit
def activate(gate, SILU: tl.constexpr):
    if SILU:
        result = silu(gate)
    else:
        result = sigmoid(gate)
    return result


@triton.jit
def activate_derivative(gate, SILU: tl.constexpr):
    if SILU:
        result = silu_derivative(gate)
    else:
        result = sigmoid_derivative(gate)
    return result


@triton.jit
def forward_chunks(
    x, gate, weight, y, rstd_out, rows, n,
    x_row, x_column, gate_row, gate_column, weight_column, eps, weight_offset,
    SILU: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The forward of a program's rows, chunk by chunk."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [R]
    mask = row < rows
    rstd = inverse_rms(x, row * x_row, mask, n, x_column, eps, ROWS, CHUNK)
    tl.store(rstd_out + row, rstd, mask=mask)
    for start in range(0, n, CHUNK):
        values = load_chunk(x, row * x_row, mask, start, n, x_column, CHUNK)
        act = activate(load_chunk(gate, row * gate_row, mask, start, n, gate_column, CHUNK), SILU)
        factor = offset_weight(weight, weight_offset, start, n, weight_column, CHUNK)
        result = values * rstd[:, None] * factor[None, :] * act
        store_chunk(y, result, row, mask, start, n, CHUNK)


@triton.jit
def forward_blocks(
    x, gate, weight, y, rstd_out, rows, n,
    x_row, x_column, gate_row, gate_column, weight_column, eps, weight_offset,
    SILU: tl.constexpr, FULL: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The forward of a program's blocks of whole rows."""
    factor = offset_weight(weight, weight_offset, 0, n, weight_column, WIDTH)[None, :]
    blocks = tl.cdiv(rows, ROWS)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)  # [R]
        mask = row < rows
        values = load_rows(x, row, mask, n, x_row, x_column, FULL, WIDTH)
        act = activate(load_rows(gate, row, mask, n, gate_row, gate_column, FULL, WIDTH), SILU)
        rstd = inverse_root(row_mean(row_dot(values, values), n, FULL, WIDTH), eps, False)
        tl.store(rstd_out + row, rstd, mask=mask)
        store_rows(y, values * rstd[:, None] * factor * act, row, mask, n, FULL, WIDTH)


@triton.jit
def rms_norm_gated_forward(
    x, gate, weight, y, rstd_out, rows, n,
    x_row, x_column, gate_row, gate_column, weight_column, eps, weight_offset,
    SILU: tl.constexpr,
    WHOLE: tl.constexpr, FULL: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if WHOLE:
        forward_blocks(
            x, gate, weight, y, rstd_out, rows, n,
            x_row, x_column, gate_row, gate_column, weight_column, eps, weight_offset,
            SILU, FULL, ROWS, COLUMNS, STAGES,
        )  # fmt: skip
    else:
        forward_chunks(
            x, gate, weight, y, rstd_out, rows, n,
            x_row, x_column, gate_row, gate_column, weight_column, eps, weight_offset,
            SILU, ROWS, COLUMNS,
        )  # fmt: skip


@triton.jit
def backward_chunks(
    dy, x, gate, weight, rstd_in, dx, dgate, state, rows, n,
    dy_row, dy_column, x_row, x_column, gate_row, gate_column, weight_column, rstd_row,
    weight_offset,
    NEED_X: tl.constexpr, NEED_GATE: tl.constexpr, NEED_WEIGHT: tl.constexpr,
    SILU: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
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
            z = load_chunk(gate, row * gate_row, mask, start, n, gate_column, CHUNK)
            factor = offset_weight(weight, weight_offset, start, n, weight_column, CHUNK)
            m = m + chunk_dot(upstream * factor[None, :] * activate(z, SILU), xhat)
        m = divide(m, tl.zeros([ROWS], tl.float32) + n)
    for start in range(0, n, CHUNK):
        upstream = load_chunk(dy, row * dy_row, mask, start, n, dy_column, CHUNK)
        xhat = load_xhat(x, row * x_row, mask, start, n, x_column, rstd, CHUNK)
        z = load_chunk(gate, row * gate_row, mask, start, n, gate_column, CHUNK)
        factor = offset_weight(weight, weight_offset, start, n, weight_column, CHUNK)[None, :]
        act = activate(z, SILU)
        if NEED_X:
            gradient = input_gradient(upstream * factor * act, xhat, rstd, m)
            store_chunk(dx, gradient, row, mask, start, n, CHUNK)
        if NEED_GATE:
            gradient = upstream * xhat * factor * activate_derivative(z, SILU)
            store_chunk(dgate, gradient, row, mask, start, n, CHUNK)
        if NEED_WEIGHT:
            columns = start + tl.arange(0, CHUNK)
            inside = mask[:, None] & (columns < n)[None, :]
            add_block(state, columns, n, upstream * xhat * act, inside)


@triton.jit
def weight_terms(
    dy, x, gate, rstd_in, block, rows, n,
    dy_row, dy_column, x_row, x_column, gate_row, gate_column, rstd_row,
    SILU: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Terms of dweight of a block of whole rows, zero beyond them."""
    row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)  # [R]
    z = load_rows(gate, row, row < rows, n, gate_row, gate_column, FULL, WIDTH)
    terms = ungated_terms(
        dy, x, rstd_in, block, rows, n, dy_row, dy_column, x_row, x_column, rstd_row,
        FULL, ROWS, WIDTH,
    )  # fmt: skip
    return terms * activate(z, SILU)


@triton.jit
def backward_blocks(
    dy, x, gate, weight, rstd_in, dx, dgate, state, rows, n,
    dy_row, dy_column, x_row, x_column, gate_row, gate_column, weight_column, rstd_row,
    weight_offset,
    NEED_X: tl.constexpr, NEED_GATE: tl.constexpr, NEED_WEIGHT: tl.constexpr,
    SILU: tl.constexpr, FULL: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The backward of a program's blocks of whole rows."""
    columns = tl.arange(0, WIDTH)
    factor = offset_weight(weight, weight_offset, 0, n, weight_column, WIDTH)[None, :]
    if NEED_WEIGHT:
        seen = weight_terms(
            dy, x, gate, rstd_in, tl.program_id(0), rows, n,
            dy_row, dy_column, x_row, x_column, gate_row, gate_column, rstd_row,
            SILU, FULL, ROWS, WIDTH,
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
        z = load_rows(gate, row, mask, n, gate_row, gate_column, FULL, WIDTH)
        act = activate(z, SILU)
        if NEED_X:
            g = upstream * factor * act
            m = row_mean(row_dot(g, xhat), n, FULL, WIDTH)
            store_rows(dx, input_gradient(g, xhat, rstd, m), row, mask, n, FULL, WIDTH)
        if NEED_GATE:
            gradient = upstream * xhat * factor * activate_derivative(z, SILU)
            store_rows(dgate, gradient, row, mask, n, FULL, WIDTH)
        if NEED_WEIGHT:
            upper, lower, missed = add_terms(upper, lower, missed, upstream * xhat * act, unit)
    if NEED_WEIGHT:
        add_levels(state, columns, n, upper, lower, unit)
        if tl.max(missed) > 0:
            for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
                terms = weight_terms(
                    dy, x, gate, rstd_in, block, rows, n,
                    dy_row, dy_column, x_row, x_column, gate_row, gate_column, rstd_row,
                    SILU, FULL, ROWS, WIDTH,
                )  # fmt: skip
                add_block(state, columns, n, terms, ~takes(terms, unit))


@triton.jit
def rms_norm_gated_backward(
    dy, x, gate, weight, rstd_in, dx, dgate, state, rows, n,
    dy_row, dy_column, x_row, x_column, gate_row, gate_column, weight_column, rstd_row,
    weight_offset,
    NEED_X: tl.constexpr, NEED_GATE: tl.constexpr, NEED_WEIGHT: tl.constexpr, SILU: tl.constexpr,
    WHOLE: tl.constexpr, FULL: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if WHOLE:
        backward_blocks(
            dy, x, gate, weight, rstd_in, dx, dgate, state, rows, n,
            dy_row, dy_column, x_row, x_column, gate_row, gate_column, weight_column, rstd_row,
            weight_offset, NEED_X, NEED_GATE, NEED_WEIGHT, SILU, FULL, ROWS, COLUMNS, STAGES,
        )  # fmt: skip
    else:
        backward_chunks(
            dy, x, gate, weight, rstd_in, dx, dgate, state, rows, n,
            dy_row, dy_column, x_row, x_column, gate_row, gate_column, weight_column, rstd_row,
            weight_offset, NEED_X, NEED_GATE, NEED_WEIGHT, SILU, ROWS, COLUMNS,
        )  # fmt: skip


def forward(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    activation: str,
    weight_offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [T, N], rstd [T])"""
    rows, n = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    grid, meta = blocking(x, FORWARD_WARPS, STAGES)
    launch_triton(
        rms_norm_gated_forward, grid, x, gate, weight, y, rstd, rows, n,
        *x.stride(), *gate.stride(), *weight.stride(), eps, weight_offset,
        SILU=activation == "silu", **meta,
    )  # fmt: skip
    return y, rstd


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    *,
    eps: float,
    activation: str,
    weight_offset: float,
    needs: frozenset[str],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(dx [T, N], dgate [T, N], exact state of dweight [13, N])"""
    rows, n = x.shape
    need_x, need_gate, need_weight = (name in needs for name in ("x", "gate", "weight"))
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else None
    dgate = torch.empty_like(x, memory_format=torch.contiguous_format) if need_gate else None
    state = exact_sum.new(n, x.device) if need_weight else None
    grid, meta = blocking(x, BACKWARD_WARPS, STAGES)
    launch_triton(
        rms_norm_gated_backward, grid,
        dy, x, gate, weight, rstd,
        x if dx is None else dx, x if dgate is None else dgate, rstd if state is None else state,
        rows, n, *dy.stride(), *x.stride(), *gate.stride(), *weight.stride(), *rstd.stride(),
        weight_offset,
        NEED_X=need_x, NEED_GATE=need_gate, NEED_WEIGHT=need_weight,
        SILU=activation == "silu", **meta,
    )  # fmt: skip
    if state is not None:
        normalise_(state)
    return dx, dgate, state
