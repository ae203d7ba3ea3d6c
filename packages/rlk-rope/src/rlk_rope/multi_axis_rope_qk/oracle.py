# SPDX-License-Identifier: Apache-2.0
"""Which value is right: the formula of one tensor on both."""

import torch

from ..multi_axis_rope import oracle as one


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool,
    rounding: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q_out, k_out); gradients come from autograd."""
    (q_out,) = one.forward(q, cos, sin, interleaved=interleaved, rounding=rounding)
    (k_out,) = one.forward(k, cos, sin, interleaved=interleaved, rounding=rounding)
    return q_out, k_out
