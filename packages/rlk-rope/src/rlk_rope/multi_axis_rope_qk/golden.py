# SPDX-License-Identifier: Apache-2.0
"""Which bits are right: those of one tensor, twice."""

import torch

from rlk.launch import start_golden

from ..multi_axis_rope.golden import rotate


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool,
    rounding: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q_out [B, S, H, D], k_out [B, S, G, D])"""
    start_golden("multi_axis_rope_qk_forward", __file__)
    call = (cos, sin, interleaved, rounding)
    return rotate(q, *call, inverse=False), rotate(k, *call, inverse=False)


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
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dq [B, S, H, D], dk [B, S, G, D])"""
    start_golden("multi_axis_rope_qk_backward", __file__)
    call = (cos, sin, interleaved, rounding)
    return (
        rotate(dq_out, *call, inverse=True) if "q" in needs else None,
        rotate(dk_out, *call, inverse=True) if "k" in needs else None,
    )
