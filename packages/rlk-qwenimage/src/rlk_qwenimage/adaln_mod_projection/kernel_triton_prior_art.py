# SPDX-License-Identifier: Apache-2.0
"""Products in one fixed tile: the plain way to batch invariance, for survey and benchmark.

Every element is one sum over blocks of K in ascending order, whatever the number of rows, and no
tile is ever chosen by shape; 64x64x64 was not tuned. As many programs as there are multiprocessors
form tile after tile, in a fixed order. No operator uses this kernel.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from rlk.reduce.mma_chain.kernel_triton import multiprocessors

ROWS, COLUMNS, DEPTH = 64, 64, 64


@triton.jit
def product_in_one_tile(
    a, b, out, rows, columns, depth, a_m, a_k, b_k, b_n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    high = tl.cdiv(rows, ROWS)
    count = high * tl.cdiv(columns, COLUMNS)
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0)):
        m = tile % high * ROWS + tl.arange(0, ROWS)
        n = tile // high * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, depth, DEPTH):
            k = start + tl.arange(0, DEPTH)
            inside = (m[:, None] < rows) & (k[None, :] < depth)
            left = tl.load(a + m[:, None] * a_m + k[None, :] * a_k, mask=inside, other=0.0)
            inside = (k[:, None] < depth) & (n[None, :] < columns)
            right = tl.load(b + k[:, None] * b_k + n[None, :] * b_n, mask=inside, other=0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
        inside = (m[:, None] < rows) & (n[None, :] < columns)
        tl.store(out + m[:, None] * columns + n[None, :], total, mask=inside)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, rounded once to their dtype; any strides."""
    (rows, depth), columns = a.shape, b.shape[1]
    out = torch.empty(rows, columns, dtype=torch.float32, device=a.device)
    tiles = triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS)
    product_in_one_tile[(min(tiles, multiprocessors(a.device)),)](
        a, b, out, rows, columns, depth, *a.stride(), *b.stride(),
        ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH,
    )  # fmt: skip
    return out


class OneTile(torch.autograd.Function):
    """act @ weight^T + bias, all three products in that tile; the bias by PyTorch's sum."""

    @staticmethod
    def forward(
        ctx: Any, act: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(act, weight, bias)
        return (product(act, weight.T) + bias.float()).to(act.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        act, weight, bias = ctx.saved_tensors
        dact = product(dy, weight).to(act.dtype)
        dweight = product(dy.T, act).to(weight.dtype)
        return dact, dweight, dy.float().sum(0).to(bias.dtype)
