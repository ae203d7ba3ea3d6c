# SPDX-License-Identifier: Apache-2.0
"""The product on the GPU, by the launcher of kernel_cuda.cu."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from rlk.cuda.header import Layout
from rlk.cuda.launch import DTYPE_CODES, allocator, current_stream
from rlk.cuda.steps import Steps
from rlk.reduce.mma_chain.tiles import CUDA, Tile, choose_cuda

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
        ("int", "device"),
    ),
)

steps = Steps("mma_chain", Path(__file__).with_name("kernel_cuda.cu"), {"product": _PRODUCT})
launches = (steps,)


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
    tile = tile or choose_cuda(m, n, k)
    bias_stride, bias_dtype = (0, dtype) if bias is None else (bias.stride(0), bias.dtype)
    constants = (
        *a.stride(), *b.stride(), bias_stride, *((0, 0) if initial is None else initial.stride()),
        m, n, k, DTYPE_CODES[a.dtype], DTYPE_CODES[bias_dtype], DTYPE_CODES[dtype],
        tile.m, tile.n, device,
    )  # fmt: skip
    enqueue = steps.enqueuer("product", device)

    def plan(a: int, b: int, bias: int = 0, initial: int = 0) -> torch.Tensor:
        out, stream = empty(), current_stream(device)
        enqueue(a, b, bias, initial, out.data_ptr(), stream, *constants, call=call)
        return out

    return plan


def candidates(a: torch.Tensor, b: torch.Tensor) -> tuple[Tile, ...]:
    """Every tile that may serve operands of these layouts, of whatever size."""
    return tuple(dict.fromkeys(row.tile for row in CUDA))
