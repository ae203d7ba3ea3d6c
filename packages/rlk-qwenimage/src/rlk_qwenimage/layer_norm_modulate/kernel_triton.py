# SPDX-License-Identifier: Apache-2.0
"""layer_norm_modulate in Triton: forward, dx, and exact sums over tokens; same bits as golden."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl

from rlk.launch import launch_triton, multiprocessors
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
from rlk.reduce.exact_sum.kernel_triton import normalise_, round_into
from rlk.reduce.row_sum.device_triton import chunk_dot, chunk_sum, row_dot, row_sum

from .device_triton import (
    CHUNK,
    ROWS,
    centre,
    input_gradient,
    inverse_root,
    load_chunk,
    modulate,
    normalise,
    row_mean,
    statistics,
    store_chunk,
    token_rows,
)

# 4096: columns of the widest tokens that a program holds in registers.
WIDEST = 4096
# 4: warps of whole tokens, which meet once or twice; a GPU has many tokens on their way.
ROW_WARPS = 4
# 64 and 80: registers by which a multiprocessor has 8 and 6 of these programs.
FORWARD_REGISTERS = 64
DX_REGISTERS = 80
# 4 tokens, one a warp, of 256 columns, 16 bytes of BF16 a thread.
SUM_TOKENS = 4
SUM_COLUMNS = 256
# 2: programs of a multiprocessor. Levels of two sums are half of 168 registers; 4 stages: three
# more blocks are on their way while one is added. More programs with fewer of both are slower.
SUM_PROGRAMS = 2
SUM_REGISTERS = 168
SUM_STAGES = 4
# 8: samples of so few tokens have blocks of them all, whose terms need no levels.
FEW_TOKENS = 8
FEW_COLUMNS = 512
# 32 MiB: exact states of the samples that are summed at a time; less than the gradient of a BF16
# weight [6144, 3072], which final_adaln_out allocates when they are gone.
STATE_BYTES = 1 << 25


@triton.jit
def layer_norm_modulate_forward(
    x, scale, shift, out, mean_out, rstd_out, rows, tokens, n,
    x_sample, x_token, x_column, scale_sample, scale_column, shift_sample, shift_column, eps,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Some rows, each as one chunk if WHOLE."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [R]
    mask = row < rows
    x_rows = token_rows(row, tokens, x_sample, x_token)
    sample = row // tokens
    if WHOLE:
        values = load_chunk(x, x_rows, mask, 0, n, x_column, CHUNK)
        mean = row_mean(row_sum(values), n)
        centred = centre(values, mean, 0, n)
        rstd = inverse_root(row_dot(centred, centred), n, eps)
        by = load_chunk(scale, sample * scale_sample, mask, 0, n, scale_column, CHUNK)
        to = load_chunk(shift, sample * shift_sample, mask, 0, n, shift_column, CHUNK)
        result = modulate(centred * rstd[:, None], by, to)
        store_chunk(out, result, row, mask, 0, n, CHUNK)
    else:
        mean, rstd = statistics(x, x_rows, mask, n, x_column, eps, ROWS, CHUNK)
        for start in range(0, n, CHUNK):
            values = load_chunk(x, x_rows, mask, start, n, x_column, CHUNK)
            by = load_chunk(scale, sample * scale_sample, mask, start, n, scale_column, CHUNK)
            to = load_chunk(shift, sample * shift_sample, mask, start, n, shift_column, CHUNK)
            result = modulate(normalise(values, mean, rstd, start, n), by, to)
            store_chunk(out, result, row, mask, start, n, CHUNK)
    tl.store(mean_out + row, mean, mask=mask)
    tl.store(rstd_out + row, rstd, mask=mask)


@triton.jit
def layer_norm_modulate_dx(
    dout, x, scale, mean_in, rstd_in, dx, rows, tokens, n,
    dout_sample, dout_token, dout_column, x_sample, x_token, x_column, scale_sample, scale_column,
    mean_sample, mean_token, rstd_sample, rstd_token,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Some rows, each as one chunk if WHOLE."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [R]
    mask = row < rows
    dout_rows = token_rows(row, tokens, dout_sample, dout_token)
    x_rows = token_rows(row, tokens, x_sample, x_token)
    scale_rows = row // tokens * scale_sample
    mean = tl.load(mean_in + token_rows(row, tokens, mean_sample, mean_token), mask=mask, other=0.0)
    rstd = tl.load(rstd_in + token_rows(row, tokens, rstd_sample, rstd_token), mask=mask, other=0.0)
    if WHOLE:
        upstream = load_chunk(dout, dout_rows, mask, 0, n, dout_column, CHUNK)
        values = load_chunk(x, x_rows, mask, 0, n, x_column, CHUNK)
        g = upstream * (1.0 + load_chunk(scale, scale_rows, mask, 0, n, scale_column, CHUNK))
        xhat = normalise(values, mean, rstd, 0, n)
        m1 = row_mean(row_sum(g), n)
        m2 = row_mean(row_dot(g, xhat), n)
        store_chunk(dx, input_gradient(g, xhat, rstd, m1, m2), row, mask, 0, n, CHUNK)
    else:
        m1 = tl.zeros([ROWS], tl.float32)
        m2 = tl.zeros([ROWS], tl.float32)
        # ORDER: chunks of 256 ascending along N
        for start in range(0, n, CHUNK):
            upstream = load_chunk(dout, dout_rows, mask, start, n, dout_column, CHUNK)
            values = load_chunk(x, x_rows, mask, start, n, x_column, CHUNK)
            by = load_chunk(scale, scale_rows, mask, start, n, scale_column, CHUNK)
            g = upstream * (1.0 + by)
            m1 = m1 + chunk_sum(g)
            m2 = m2 + chunk_dot(g, normalise(values, mean, rstd, start, n))
        m1 = row_mean(m1, n)
        m2 = row_mean(m2, n)
        for start in range(0, n, CHUNK):
            upstream = load_chunk(dout, dout_rows, mask, start, n, dout_column, CHUNK)
            values = load_chunk(x, x_rows, mask, start, n, x_column, CHUNK)
            by = load_chunk(scale, scale_rows, mask, start, n, scale_column, CHUNK)
            xhat = normalise(values, mean, rstd, start, n)
            gradient = input_gradient(upstream * (1.0 + by), xhat, rstd, m1, m2)
            store_chunk(dx, gradient, row, mask, start, n, CHUNK)


def blocking(rows: int, n: int, registers: int) -> tuple[tuple[int], dict[str, Any]]:
    """(grid, meta) of a kernel on so many rows; threads of whole ones have so many registers."""
    if n > WIDEST:
        return (triton.cdiv(rows, ROWS),), {"WHOLE": False, "ROWS": ROWS, "CHUNK": CHUNK}
    width = max(8, triton.next_power_of_2(n))
    # A thread has 8 columns at least.
    height = max(1, ROW_WARPS * CHUNK // width)
    meta = {"WHOLE": True, "ROWS": height, "CHUNK": width}
    return (triton.cdiv(rows, height),), meta | {"num_warps": ROW_WARPS, "maxnreg": registers}


@triton.jit
def token_terms(
    dout, x, mean_in, rstd_in, sample, block, tokens, start, n,
    dout_sample, dout_token, dout_column, x_sample, x_token, x_column,
    mean_sample, mean_token, rstd_sample, rstd_token,
    NEED_SCALE: tl.constexpr, FULL: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Terms of dshift and, if needed, of dscale of a block, zero beyond tokens or columns."""
    token = tl.cast(block, tl.int64) * TOKENS + tl.arange(0, TOKENS)
    mask = token < tokens
    dout_rows = sample * dout_sample + token * dout_token
    upstream = load_chunk(dout, dout_rows, mask, start, n, dout_column, COLUMNS, FULL)
    product = upstream
    if NEED_SCALE:
        at_mean = mean_in + sample * mean_sample + token * mean_token
        at_rstd = rstd_in + sample * rstd_sample + token * rstd_token
        mean = tl.load(at_mean, mask=mask, other=0.0)
        rstd = tl.load(at_rstd, mask=mask, other=0.0)
        x_rows = sample * x_sample + token * x_token
        values = load_chunk(x, x_rows, mask, start, n, x_column, COLUMNS, FULL)
        product = upstream * normalise(values, mean, rstd, start, n, FULL)
    return upstream, product


@triton.jit
def layer_norm_modulate_sums(
    dout, x, mean_in, rstd_in, scale_state, shift_state, first, samples, tokens, parts, n,
    dout_sample, dout_token, dout_column, x_sample, x_token, x_column,
    mean_sample, mean_token, rstd_sample, rstd_token,
    NEED_SCALE: tl.constexpr, NEED_SHIFT: tl.constexpr, LEVELS: tl.constexpr,
    FULL: tl.constexpr, STAGES: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of one part of the tokens of a sample, from `first` on, to their states.

    A part is a block of tokens, or with LEVELS every so-manieth one.
    """
    program = tl.program_id(0)
    column_blocks = tl.cdiv(n, COLUMNS)
    part = program // column_blocks % parts
    place = (program // column_blocks // parts).to(tl.int64)
    sample = first + place
    start = program % column_blocks * COLUMNS
    sums = place * n + start + tl.arange(0, COLUMNS)  # [C]
    width = tl.cast(samples, tl.int64) * n
    blocks = tl.cdiv(tokens, TOKENS)
    missed, shift_unit, scale_unit = 1, 1.0, 1.0
    if LEVELS:
        upstream, product = token_terms(
            dout, x, mean_in, rstd_in, sample, part, tokens, start, n,
            dout_sample, dout_token, dout_column, x_sample, x_token, x_column,
            mean_sample, mean_token, rstd_sample, rstd_token, NEED_SCALE, FULL, TOKENS, COLUMNS,
        )  # fmt: skip
        shift_unit, scale_unit = window(upstream), window(product)
        scale_upper, scale_lower, notes = no_terms(TOKENS, COLUMNS)
        shift_upper, shift_lower, _ = no_terms(TOKENS, COLUMNS)
        for block in tl.range(part, blocks, parts, num_stages=STAGES):
            upstream, product = token_terms(
                dout, x, mean_in, rstd_in, sample, block, tokens, start, n,
                dout_sample, dout_token, dout_column, x_sample, x_token, x_column,
                mean_sample, mean_token, rstd_sample, rstd_token, NEED_SCALE, FULL, TOKENS, COLUMNS,
            )  # fmt: skip
            if NEED_SCALE:
                scale_upper, scale_lower, notes = add_terms(
                    scale_upper, scale_lower, notes, product, scale_unit
                )
            if NEED_SHIFT:
                shift_upper, shift_lower, notes = add_terms(
                    shift_upper, shift_lower, notes, upstream, shift_unit
                )
        if NEED_SCALE:
            add_levels(scale_state, sums, width, scale_upper, scale_lower, scale_unit)
        if NEED_SHIFT:
            add_levels(shift_state, sums, width, shift_upper, shift_lower, shift_unit)
        missed = tl.max(notes)
    if missed > 0:
        for block in range(part, blocks, parts):
            upstream, product = token_terms(
                dout, x, mean_in, rstd_in, sample, block, tokens, start, n,
                dout_sample, dout_token, dout_column, x_sample, x_token, x_column,
                mean_sample, mean_token, rstd_sample, rstd_token, NEED_SCALE, FULL, TOKENS, COLUMNS,
            )  # fmt: skip
            if NEED_SCALE:
                add_block(scale_state, sums, width, product, remains(product, scale_unit, LEVELS))
            if NEED_SHIFT:
                add_block(shift_state, sums, width, upstream, remains(upstream, shift_unit, LEVELS))


@triton.jit
def remains(terms, unit, LEVELS: tl.constexpr):
    """Where terms are left to `add_block`: all are without levels."""
    if LEVELS:
        left = ~takes(terms, unit)
    else:
        left = terms != 0.0
    return left


def forward(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out [T, S, N], mean [T, S], rstd [T, S])"""
    samples, tokens, n = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    mean, rstd = (x.new_empty(samples, tokens, dtype=torch.float32) for _ in range(2))
    rows = samples * tokens
    grid, meta = blocking(rows, n, FORWARD_REGISTERS)
    launch_triton(
        layer_norm_modulate_forward, grid,
        x, scale, shift, out, mean, rstd, rows, tokens, n,
        *x.stride(), *scale.stride(), *shift.stride(), eps, **meta,
    )  # fmt: skip
    return out, mean, rstd


def backward(
    dout: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    *,
    eps: float,
    needs: frozenset[str],
    into: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(dx [T, S, N], dscale [T, N], dshift [T, N]); `into` is memory for the sums by name."""
    dx = None
    if "x" in needs:
        samples, tokens, n = x.shape
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows = samples * tokens
        grid, meta = blocking(rows, n, DX_REGISTERS)
        launch_triton(
            layer_norm_modulate_dx, grid,
            dout, x, scale, mean, rstd, dx, rows, tokens, n,
            *dout.stride(), *x.stride(), *scale.stride(), *mean.stride(), *rstd.stride(),
            **meta,
        )  # fmt: skip
    sums = {
        name: into[name]
        if name in into
        else torch.empty_like(like, memory_format=torch.contiguous_format)
        for name, like in (("scale", scale), ("shift", shift))
        if name in needs
    }
    if sums:
        token_sums(dout, x, mean, rstd, sums)
    return dx, sums.get("scale"), sums.get("shift")


def token_sums(
    dout: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    sums: dict[str, torch.Tensor],
) -> None:
    """Fill dscale and dshift [T, N], some samples after others so that their states stay small."""
    samples, _, n = x.shape
    state_bytes = len(sums) * exact_sum.STATE_ROWS * n * torch.int64.itemsize
    group = min(samples, max(1, STATE_BYTES // state_bytes))
    # One memory for all groups: new states beside the last ones would be twice as large.
    most = exact_sum.STATE_ROWS * group * n
    memory = {name: x.new_empty(most, dtype=torch.int64) for name in sums}
    for first in range(0, samples, group):
        count = min(group, samples - first)
        width = exact_sum.STATE_ROWS * count * n
        states = {name: m[:width].zero_().view(-1, count * n) for name, m in memory.items()}
        add_tokens(dout, x, mean, rstd, states, first, count)
        for name, state in states.items():
            round_into(sums[name][first : first + count].view(-1), state)


def token_states(
    dout: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    needs: frozenset[str],
) -> list[torch.Tensor]:
    """The exact states [13, T * N] of dscale and of dshift, those that are needed."""
    samples, _, n = x.shape
    states = {
        name: exact_sum.new(samples * n, x.device) for name in ("scale", "shift") if name in needs
    }
    add_tokens(dout, x, mean, rstd, states, 0, samples)
    return [normalise_(state) for state in states.values()]


def add_tokens(
    dout: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    states: dict[str, torch.Tensor],
    first: int,
    count: int,
) -> None:
    """Add the tokens of `count` samples to their states [13, count * N], not normalised."""
    _, tokens, n = x.shape
    few = tokens <= FEW_TOKENS
    rows, columns = (FEW_TOKENS, FEW_COLUMNS) if few else (SUM_TOKENS, SUM_COLUMNS)
    blocks, wide = triton.cdiv(tokens, rows), count * triton.cdiv(n, columns)
    # As many parts as keep a GPU busy, or more where levels have no room for all of their blocks.
    parts = min(blocks, triton.cdiv(SUM_PROGRAMS * multiprocessors(x.device), max(wide, 1)))
    parts = max(parts, triton.cdiv(blocks, MAX_TERMS.value))
    options = {} if few else {"num_warps": SUM_TOKENS, "maxnreg": SUM_REGISTERS}
    unused = mean
    launch_triton(
        layer_norm_modulate_sums, (wide * parts,),
        dout, x, mean, rstd, states.get("scale", unused), states.get("shift", unused),
        first, count, tokens, parts, n,
        *dout.stride(), *x.stride(), *mean.stride(), *rstd.stride(),
        NEED_SCALE="scale" in states, NEED_SHIFT="shift" in states, LEVELS=not few,
        FULL=n % columns == 0, STAGES=SUM_STAGES, TOKENS=rows, COLUMNS=columns, **options,
    )  # fmt: skip
