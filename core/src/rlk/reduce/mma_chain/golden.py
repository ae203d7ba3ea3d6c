# SPDX-License-Identifier: Apache-2.0
"""The MMA chain in PyTorch on the CPU: which values backends must give, not which bits."""

import torch

# 16: products that one step of a tensor core adds to the accumulator.
STEP = 16
# 2^19: accumulators of a block, so that each FP64 temporary takes 4 MiB.
_BLOCK = 1 << 19


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    initial: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """c [M, N] of `dtype`: the chain of a [M, K] and b [N, K]."""
    out = torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.device)
    rows = max(1, _BLOCK // max(1, b.shape[0]))
    # [K, N]: the products of one k then read one run of memory.
    columns = b.t().to(torch.float64).contiguous()
    for first in range(0, a.shape[0], rows):
        part = slice(first, first + rows)
        start = None if initial is None else initial[part]
        acc = chain(a[part].to(torch.float64), columns, start)
        if bias is not None:
            acc = acc + bias.to(torch.float32)
        out[part] = acc.to(dtype)
    return out


def chain(a: torch.Tensor, b: torch.Tensor, initial: torch.Tensor | None) -> torch.Tensor:
    """The finished FP32 accumulators [M, N] of a [M, K] and b [K, N], both FP64."""
    shape = a.shape[0], b.shape[1]
    acc = torch.zeros(shape, device=a.device) if initial is None else initial
    total, term = (torch.empty(shape, dtype=torch.float64, device=a.device) for _ in range(2))
    for first in range(0, a.shape[1], STEP):
        # ORDER: ascending K; the products are exact in FP64.
        for k in range(first, min(first + STEP, a.shape[1])):
            if k == first:
                torch.mul(a[:, k, None], b[k], out=total)
            else:
                torch.mul(a[:, k, None], b[k], out=term)
                total.add_(term)
        acc = (total.add_(acc)).to(torch.float32)
    return acc + 0.0
