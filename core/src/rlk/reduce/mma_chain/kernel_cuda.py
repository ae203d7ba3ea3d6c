# SPDX-License-Identifier: Apache-2.0
"""The product on the GPU, by the launcher of kernel_cuda.cu."""

from pathlib import Path

import torch

from rlk.cuda.header import Layout
from rlk.cuda.launch import DTYPE_CODES, current_stream
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
    out = torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.device)
    if not out.numel():
        return out
    tile = tile or choose_cuda(a.shape[0], b.shape[0], a.shape[1])
    device = a.get_device()
    bias_pointer, bias_stride, bias_dtype = 0, 0, dtype
    if bias is not None:
        bias_pointer, bias_stride, bias_dtype = bias.data_ptr(), bias.stride(0), bias.dtype
    start, start_strides = 0, [0, 0]
    if initial is not None:
        start, start_strides = initial.data_ptr(), [*initial.stride()]
    steps.launch(
        "product", device,
        a.data_ptr(), b.data_ptr(), bias_pointer, start, out.data_ptr(), current_stream(device),
        *a.stride(), *b.stride(), bias_stride, *start_strides, *out.shape, a.shape[1],
        DTYPE_CODES[a.dtype], DTYPE_CODES[bias_dtype], DTYPE_CODES[dtype], tile.m, tile.n, device,
    )  # fmt: skip
    return out


def candidates(a: torch.Tensor, b: torch.Tensor) -> tuple[Tile, ...]:
    """Every tile that may serve operands of these layouts, of whatever size."""
    return tuple(dict.fromkeys(row.tile for row in CUDA))
