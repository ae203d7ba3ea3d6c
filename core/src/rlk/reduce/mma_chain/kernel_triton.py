# SPDX-License-Identifier: Apache-2.0
"""The MMA chain as Triton kernels: one reads tiles by TMA, one by pointers."""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from rlk.launch import launch_triton
from rlk.reduce.mma_chain.device_triton import finish, mma_block, tile_place
from rlk.reduce.mma_chain.operands import Operand, operand
from rlk.reduce.mma_chain.tiles import Tile, table_for


@triton.jit
def load_tile(desc, row, k, K_MAJOR: tl.constexpr):
    """A tile [rows, BK] of an operand; what lies outside is zero."""
    if K_MAJOR:
        return desc.load([row, k])
    else:
        return desc.load([k, row]).T


@triton.jit
def load_block(ptr, row, row_count, k, K, row_stride, k_stride):
    """A tile [rows, BK] by pointers; what lies outside is zero."""
    mask = (row < row_count)[:, None] & (k < K)[None, :]
    return tl.load(ptr + row[:, None] * row_stride + k[None, :] * k_stride, mask=mask, other=0.0)


@triton.jit
def start_chain(
    initial_ptr, row, column, M, N, stride_m, stride_n,
    HAS_INITIAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The accumulators before the first step."""
    if HAS_INITIAL:
        mask = (row < M)[:, None] & (column < N)[None, :]
        at = initial_ptr + row[:, None] * stride_m + column[None, :] * stride_n
        return tl.load(at, mask=mask, other=0.0)
    else:
        return tl.zeros((BM, BN), tl.float32)


@triton.jit
def store_chain(
    out_ptr, bias_ptr, acc, row, column, M, N, stride_m, stride_n, bias_stride, BIAS: tl.constexpr
):
    """Finish, add the bias (BIAS: 0 none, 1 one a column, 2 one a row), round once and store."""
    c = finish(acc)
    if BIAS == 1:
        bias = tl.load(bias_ptr + column * bias_stride, mask=column < N, other=0.0)
        c = c + bias.to(tl.float32)[None, :]
    if BIAS == 2:
        bias = tl.load(bias_ptr + row * bias_stride, mask=row < M, other=0.0)
        c = c + bias.to(tl.float32)[:, None]
    mask = (row < M)[:, None] & (column < N)[None, :]
    at = out_ptr + row[:, None] * stride_m + column[None, :] * stride_n
    tl.store(at, c.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def tma_tile(
    tile, a_desc, b_desc, b2_desc, out_ptr, bias_ptr, initial_ptr, M, N, steps,
    out_stride_m, out_stride_n, initial_stride_m, initial_stride_n, bias_stride,
    A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr, SWAPPED: tl.constexpr, BIAS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BN2: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN + BN2] of the result, by one or two accumulators."""
    pm, pn = tile_place(tile, tl.cdiv(M, BM), tl.cdiv(N, BN + BN2), GROUP)
    first_row, first_column = pm * BM, pn * (BN + BN2)
    row = first_row + tl.arange(0, BM).to(tl.int64)
    column = first_column + tl.arange(0, BN).to(tl.int64)
    acc = start_chain(
        initial_ptr, row, column, M, N, initial_stride_m, initial_stride_n, HAS_INITIAL, BM, BN
    )
    if BN2 > 0:
        column2 = first_column + BN + tl.arange(0, BN2).to(tl.int64)
        acc2 = start_chain(
            initial_ptr, row, column2, M, N, initial_stride_m, initial_stride_n, HAS_INITIAL, BM,
            BN2,
        )  # fmt: skip
    # ORDER: ascending K, one chain from `acc` to `acc`.
    for step in range(steps):
        a = load_tile(a_desc, first_row, step * BK, A_K_MAJOR)
        acc = mma_block(a, load_tile(b_desc, first_column, step * BK, B_K_MAJOR).T, acc, SWAPPED)
        if BN2 > 0:
            b2 = load_tile(b2_desc, first_column + BN, step * BK, B_K_MAJOR)
            acc2 = mma_block(a, b2.T, acc2, SWAPPED)
    store_chain(
        out_ptr, bias_ptr, acc, row, column, M, N, out_stride_m, out_stride_n, bias_stride, BIAS
    )
    if BN2 > 0:
        store_chain(
            out_ptr, bias_ptr, acc2, row, column2, M, N, out_stride_m, out_stride_n, bias_stride,
            BIAS,
        )  # fmt: skip


# `steps` is never a constant: a loop of one known step would be unrolled and its sum folded. M is
# none either: it would only add compilations.
@triton.jit(do_not_specialize=["M", "steps"])
def chain_tma_kernel(
    a_desc, b_desc, b2_desc, out_ptr, bias_ptr, initial_ptr, M, N, steps,
    out_stride_m, out_stride_n, initial_stride_m, initial_stride_n, bias_stride,
    A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr, SWAPPED: tl.constexpr, BIAS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BN2: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Tiles of a product whose operands TMA can read."""
    if PERSISTENT:
        count = tl.cdiv(M, BM) * tl.cdiv(N, BN + BN2)
        for tile in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=True):
            tma_tile(
                tile, a_desc, b_desc, b2_desc, out_ptr, bias_ptr, initial_ptr, M, N, steps,
                out_stride_m, out_stride_n, initial_stride_m, initial_stride_n, bias_stride,
                A_K_MAJOR, B_K_MAJOR, SWAPPED, BIAS, HAS_INITIAL, BM, BN, BN2, BK, GROUP,
            )  # fmt: skip
    else:
        tma_tile(
            tl.program_id(0), a_desc, b_desc, b2_desc, out_ptr, bias_ptr, initial_ptr, M, N,
            steps, out_stride_m, out_stride_n, initial_stride_m, initial_stride_n, bias_stride,
            A_K_MAJOR, B_K_MAJOR, SWAPPED, BIAS, HAS_INITIAL, BM, BN, BN2, BK, GROUP,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M", "steps"])
def chain_kernel(
    a_ptr, b_ptr, out_ptr, bias_ptr, initial_ptr, M, N, K, steps,
    a_stride_m, a_stride_k, b_stride_n, b_stride_k,
    out_stride_m, out_stride_n, initial_stride_m, initial_stride_n, bias_stride,
    SWAPPED: tl.constexpr, BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of a product, whatever the strides and the alignment of its operands."""
    tile = tl.program_id(0).to(tl.int64)
    pm, pn = tile_place(tile, tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    row = pm * BM + tl.arange(0, BM)
    column = pn * BN + tl.arange(0, BN)
    acc = start_chain(
        initial_ptr, row, column, M, N, initial_stride_m, initial_stride_n, HAS_INITIAL, BM, BN
    )
    k = tl.arange(0, BK).to(tl.int64)
    # ORDER: ascending K, one chain from `acc` to `acc`.
    for _ in range(steps):
        a = load_block(a_ptr, row, M, k, K, a_stride_m, a_stride_k)
        b = load_block(b_ptr, column, N, k, K, b_stride_n, b_stride_k)
        acc = mma_block(a, b.T, acc, SWAPPED)
        k += BK
    store_chain(
        out_ptr, bias_ptr, acc, row, column, M, N, out_stride_m, out_stride_n, bias_stride, BIAS
    )


def descriptor(of: Operand, rows: int, k: int) -> TensorDescriptor:
    """What TMA reads tiles [rows, k] of an operand by, in the order of memory."""
    sizes = list(of.tensor.shape)
    block = [rows, k]
    if not of.k_major:
        sizes.reverse()
        block.reverse()
    return TensorDescriptor(of.tensor, sizes, [of.leading, 1], block)


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability; in the interpreter that of Hopper."""
    return (9, 0) if device.type == "cpu" else torch.cuda.get_device_capability(device)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs of one tile each run at the same time, at least."""
    if device.type == "cpu":
        return 3  # any small number: the interpreter runs one program after another
    return torch.cuda.get_device_properties(device).multi_processor_count


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    initial: torch.Tensor | None,
    dtype: torch.dtype,
    tile: Tile | None = None,
) -> torch.Tensor:
    """c [M, N] of `dtype`: the chain of a [M, K] and b [N, K], by the table's tile or another."""
    out = torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.device)
    if out.numel():
        left, right = operand(a), operand(b)
        by_tma = _reads_by_tma(left, right)
        if tile is None:
            table = table_for(capability(a.device), by_tma=by_tma)
            fp32 = a.dtype == torch.float32
            tile = table.choose(a.shape[0], b.shape[0], a.shape[1], fp32=fp32)
        axis = 0 if bias is None else 1
        c, start = out, initial
        if tile.swap:
            left, right, axis = right, left, 2 * axis
            c, start = out.t(), None if initial is None else initial.t()
        (_launch_tma if by_tma else _launch)(left, right, bias, axis, start, c, tile)
    return out


def candidates(a: torch.Tensor, b: torch.Tensor) -> tuple[Tile, ...]:
    """Every tile that may serve operands of these layouts, of whatever size."""
    table = table_for(capability(a.device), by_tma=_reads_by_tma(operand(a), operand(b)))
    return table.candidates(fp32=a.dtype == torch.float32)


def _reads_by_tma(left: Operand, right: Operand) -> bool:
    return left.tma and right.tma and capability(left.tensor.device) >= (9, 0)


def _launch_tma(
    left: Operand, right: Operand, bias: torch.Tensor | None, axis: int,
    start: torch.Tensor | None, c: torch.Tensor, tile: Tile,
) -> None:  # fmt: skip
    programs = triton.cdiv(c.shape[0], tile.m) * triton.cdiv(c.shape[1], tile.width)
    if tile.waves:
        programs = min(programs, tile.waves * multiprocessors(c.device))
    first = descriptor(right, tile.n, tile.k)
    second = descriptor(right, tile.n2, tile.k) if tile.n2 else first
    strides, pointers = _out_strides(c, bias, start)
    launch_triton(
        chain_tma_kernel, (programs,), descriptor(left, tile.m, tile.k),
        first, second, *pointers, *c.shape,
        triton.cdiv(left.tensor.shape[1], tile.k), *strides,
        A_K_MAJOR=left.k_major, B_K_MAJOR=right.k_major, SWAPPED=tile.swap, BIAS=axis,
        HAS_INITIAL=start is not None,
        BM=tile.m, BN=tile.n, BN2=tile.n2, BK=tile.k, GROUP=tile.group,
        PERSISTENT=tile.waves > 0, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _launch(
    left: Operand, right: Operand, bias: torch.Tensor | None, axis: int,
    start: torch.Tensor | None, c: torch.Tensor, tile: Tile,
) -> None:  # fmt: skip
    programs = triton.cdiv(c.shape[0], tile.m) * triton.cdiv(c.shape[1], tile.n)
    strides, pointers = _out_strides(c, bias, start)
    k = left.tensor.shape[1]
    launch_triton(
        chain_kernel, (programs,), left.tensor, right.tensor, *pointers, *c.shape, k,
        triton.cdiv(k, tile.k), *left.tensor.stride(), *right.tensor.stride(), *strides,
        SWAPPED=tile.swap, BIAS=axis, HAS_INITIAL=start is not None,
        BM=tile.m, BN=tile.n, BK=tile.k, GROUP=tile.group,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _out_strides(
    c: torch.Tensor, bias: torch.Tensor | None, start: torch.Tensor | None
) -> tuple[tuple[int, ...], tuple[torch.Tensor, ...]]:
    """Strides of result, start and bias, and the three tensors; what is absent is the result."""
    before = c if start is None else start
    added = c if bias is None else bias
    bias_stride = 0 if bias is None else bias.stride(0)
    return (*c.stride(), *before.stride(), bias_stride), (c, added, before)
