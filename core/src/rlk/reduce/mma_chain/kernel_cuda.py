# SPDX-License-Identifier: Apache-2.0
"""The product on the GPU, by the launcher of kernel_cuda.cu."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

from rlk.cuda.header import Layout
from rlk.cuda.launch import DTYPE_CODES, current_stream
from rlk.cuda.memory import allocator
from rlk.cuda.steps import Steps
from rlk.errors import BackendError
from rlk.reduce.mma_chain import wgmma_header
from rlk.reduce.mma_chain.operands import ALIGNMENT, operand
from rlk.reduce.mma_chain.tiles import (
    CUDA,
    WGMMA_KERNELS,
    Tile,
    choose_cuda,
    choose_wgmma,
    wgmma_candidates,
    wgmma_kernel,
)

_PRODUCT = Layout(
    "MmaChainProduct",
    (
        ("const void*", "a"),
        ("const void*", "b"),
        ("const void*", "bias"),
        ("const void*", "initial"),
        ("void*", "out"),
        ("void*", "stream"),
        ("long long", "a_stride_m"),
        ("long long", "a_stride_k"),
        ("long long", "b_stride_n"),
        ("long long", "b_stride_k"),
        ("long long", "bias_stride"),
        ("long long", "initial_stride_m"),
        ("long long", "initial_stride_n"),
        ("long long", "M"),
        ("long long", "N"),
        ("long long", "K"),
        ("int", "dtype"),
        ("int", "bias_dtype"),
        ("int", "out_dtype"),
        ("int", "tile_m"),
        ("int", "tile_n"),
        ("int", "wgmma"),
        ("int", "swap"),
        ("int", "group"),
        ("int", "device"),
    ),
)

steps = Steps(
    "mma_chain",
    Path(__file__).with_name("kernel_cuda.cu"),
    {"product": _PRODUCT},
    {wgmma_header.HEADER: wgmma_header.header()},
)
launches = (steps,)

# No number of a kernel: the tile is one of mma.sync.
_SYNC = -1


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    initial: torch.Tensor | None,
    dtype: torch.dtype,
    tile: Tile | None = None,
) -> torch.Tensor:
    """c [M, N] of `dtype`: the chain of a [M, K] and b [N, K], by the table's tile or another."""
    plan = plan_product(a, b, bias, initial, dtype, tile=tile)
    return plan(*[0 if t is None else t.data_ptr() for t in (a, b, bias, initial)])


def plan_product(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    initial: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    shape: Sequence[int] | None = None,
    tile: Tile | None = None,
    call: tuple[str, str] | None = None,
) -> Callable[..., torch.Tensor]:
    """`product` for all operands that look like these, whose values are not read.

    Args:
        shape: of c, whose leading axes may be those of a before it was flattened.
        call: operator and direction in traces.
    Returns:
        A function of the pointers to the operands; those not given are null.
    """
    (m, k), n, device = a.shape, b.shape[0], a.get_device()
    empty = allocator((m, n) if shape is None else shape, dtype, a.device)
    if not m * n:
        return lambda *pointers: empty()
    sync, wgmma = choose_cuda(m, n, k), None
    if _multiplies_by_wgmma(a, b):
        wgmma = choose_wgmma(m, n, k, _reads(a, b))
    bias_stride, bias_dtype = (0, dtype) if bias is None else (bias.stride(0), bias.dtype)
    looks = (
        *a.stride(), *b.stride(), bias_stride, *((0, 0) if initial is None else initial.stride()),
        m, n, k, DTYPE_CODES[a.dtype], DTYPE_CODES[bias_dtype], DTYPE_CODES[dtype],
    )  # fmt: skip

    def constants(chosen: Tile) -> tuple[int, ...]:
        number = _SYNC if chosen.cluster is None else _number(chosen, _reads(a, b))
        # Where a binary has no wgmma for the GPU, the launcher takes the tile of mma.sync.
        by_sync = chosen if chosen.cluster is None else sync
        tiles = by_sync.m, by_sync.n, number, chosen.swap, chosen.group
        return (*looks, *tiles, device)

    anywhere = constants(tile or sync)
    aligned = constants(tile or wgmma or sync)
    enqueue = steps.enqueuer("product", device)

    def plan(a: int, b: int, bias: int = 0, initial: int = 0) -> torch.Tensor:
        out, stream = empty(), current_stream(device)
        # Where operands lie is no part of how they look.
        rest = anywhere if (a | b) % ALIGNMENT else aligned
        enqueue(a, b, bias, initial, out.data_ptr(), stream, *rest, call=call)
        return out

    return plan


def candidates(a: torch.Tensor, b: torch.Tensor) -> tuple[Tile, ...]:
    """Every tile that may serve operands of these layouts, of whatever size; mma.sync's first."""
    tiles = tuple(dict.fromkeys(row.tile for row in CUDA))
    if _multiplies_by_wgmma(a, b) and operand(a).tma and operand(b).tma:
        tiles += wgmma_candidates(_reads(a, b))
    return tiles


def _multiplies_by_wgmma(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether wgmma serves operands that look like these, from aligned addresses."""
    fits = a.dtype != torch.float32 and operand(a).fits and operand(b).fits
    return fits and device_capability(a.device) == (9, 0)


def _reads(a: torch.Tensor, b: torch.Tensor) -> tuple[bool, bool]:
    return operand(a).k_major, operand(b).k_major


def _number(tile: Tile, reads: tuple[bool, bool]) -> int:
    """Of the kernel that forms a tile."""
    kernel = wgmma_kernel(tile, reads)
    if kernel not in WGMMA_KERNELS:
        along = " and ".join("K" if k_major else "rows" for k_major in reads)
        raise BackendError(f"mma_chain: tile must be one of operands along {along}, got {tile}")
    return WGMMA_KERNELS.index(kernel)


@cache
def device_capability(device: torch.device) -> tuple[int, int]:
    """The compute capability; of a CPU none."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
