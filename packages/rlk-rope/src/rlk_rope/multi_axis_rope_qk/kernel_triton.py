# SPDX-License-Identifier: Apache-2.0
"""Both tensors in one launch of the kernel of one."""

import torch

from ..multi_axis_rope.kernel_triton import turn


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool,
    rounding: str,
) -> tuple[torch.Tensor, ...]:
    """(q_out [B, S, H, D], k_out [B, S, G, D])"""
    return turn((q, k), cos, sin, interleaved, rounding, inverse=False)


def backward(
    dq_out: torch.Tensor,
    dk_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool,
    rounding: str,
    needs: frozenset[str],
) -> tuple[torch.Tensor | None, ...]:
    """(dq [B, S, H, D], dk [B, S, G, D])"""
    wanted = [t for name, t in (("q", dq_out), ("k", dk_out)) if name in needs]
    found = iter(turn(wanted, cos, sin, interleaved, rounding, inverse=True) if wanted else ())
    return tuple(next(found) if name in needs else None for name in ("q", "k"))
