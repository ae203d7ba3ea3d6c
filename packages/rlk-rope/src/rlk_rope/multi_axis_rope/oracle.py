# SPDX-License-Identifier: Apache-2.0
"""Which value is right: the textbook formula, in the dtype of its inputs (FP64 in tests)."""

import torch


def forward(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool, rounding: str
) -> tuple[torch.Tensor]:
    """(y,); gradients come from autograd. Both roundings stand for the same value."""
    pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if interleaved:
        first, second = turned.unflatten(-1, (pairs, 2)).unbind(-1)
    else:
        first, second = turned.unflatten(-1, (2, pairs)).unbind(-2)
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    both = (first * c - second * s, first * s + second * c)
    return (torch.cat((torch.stack(both, -1 if interleaved else -2).flatten(-2), rest), -1),)
