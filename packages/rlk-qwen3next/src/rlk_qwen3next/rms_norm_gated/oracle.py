# SPDX-License-Identifier: Apache-2.0
"""Which value is right: the textbook formula, in the dtype of its inputs (FP64 in tests)."""

import torch


def forward(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    activation: str,
    weight_offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, rstd); gradients come from autograd."""
    # Adding an offset of 0 would turn a weight of -0.0 into +0.0.
    factor = weight if weight_offset == 0.0 else weight_offset + weight
    rstd = (x.square().mean(-1) + eps).rsqrt()
    act = gate.sigmoid() if activation == "sigmoid" else gate * gate.sigmoid()
    return x * rstd.unsqueeze(-1) * factor * act, rstd
