# SPDX-License-Identifier: Apache-2.0
"""The MMA chain in PyTorch on the CPU: which values backends must give, not which bits."""

from collections.abc import Iterator

import torch

# 16: products of BF16 or FP16 that one step of a tensor core adds to the accumulator.
STEP = 16
# 32: of K, whose products of FP32 form a sum of their own before it is added.
FP32_BLOCK = 32
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
        wide = a[part].to(torch.float64)
        acc = (blocks if a.dtype == torch.float32 else chain)(wide, columns, start)
        if bias is not None:
            acc = acc + bias.to(torch.float32)
        out[part] = acc.to(dtype)
    return out


def chain(a: torch.Tensor, b: torch.Tensor, initial: torch.Tensor | None) -> torch.Tensor:
    """The finished FP32 accumulators [M, N] of a [M, K] and b [K, N], BF16 or FP16 made FP64."""
    acc = _start(a, b, initial)
    # ORDER: ascending K; a step rounds once, with the accumulator.
    for total in _sums(a, b, STEP):
        acc = total.add_(acc).to(torch.float32)
    return acc + 0.0


def blocks(a: torch.Tensor, b: torch.Tensor, initial: torch.Tensor | None) -> torch.Tensor:
    """The same of FP32 made FP64: a block rounds once, and once more when it is added."""
    acc = _start(a, b, initial)
    # ORDER: ascending K; every block starts from zero.
    for total in _sums(a, b, FP32_BLOCK):
        acc = acc + total.to(torch.float32)
    return acc + 0.0


def _start(a: torch.Tensor, b: torch.Tensor, initial: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros(a.shape[0], b.shape[1], device=a.device) if initial is None else initial


def _sums(a: torch.Tensor, b: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """For each `size` of K the FP64 sums of its products, which are exact; in one memory."""
    shape = a.shape[0], b.shape[1]
    total, term = (torch.empty(shape, dtype=torch.float64, device=a.device) for _ in range(2))
    for first in range(0, a.shape[1], size):
        torch.mul(a[:, first, None], b[first], out=total)
        # ORDER: ascending K.
        for k in range(first + 1, min(first + size, a.shape[1])):
            torch.mul(a[:, k, None], b[k], out=term)
            total.add_(term)
        yield total
