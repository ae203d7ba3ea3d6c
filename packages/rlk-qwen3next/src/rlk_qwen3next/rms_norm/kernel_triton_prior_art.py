# SPDX-License-Identifier: Apache-2.0
"""Another library's norm in our words: its operations, tile and warps, by the Triton that is here.

Source: fused_rmsnorm of sgl-project/sglang at 030e4581adb520e35790017a6ef09137b6320c6d,
python/sglang/srt/layers/elementwise.py.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def divide_by_root_kernel(
    y, x, weight, eps: tl.constexpr, n: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    inside = column < n
    place = tl.program_id(0).to(tl.int64) * n + column
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    root = tl.sqrt(tl.sum(values * values, axis=0) / n + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, values / root * factor, mask=inside)


def divide_by_root(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """y [T, N] of contiguous rows: x / sqrt(mean(x^2) + eps) * weight, forward alone."""
    rows, n = x.shape
    y = torch.empty_like(x)
    # Warps decide in which order a tile is summed.
    warps = max(4, min(32, triton.next_power_of_2(triton.cdiv(n, 256))))
    columns = triton.next_power_of_2(n)
    # With contraction and approximate division, as Triton has them unless told otherwise.
    divide_by_root_kernel[(rows,)](y, x, weight, eps, n, COLUMNS=columns, num_warps=warps)
    return y
