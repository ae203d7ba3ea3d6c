# SPDX-License-Identifier: Apache-2.0
"""Which value is right: the textbook formula, in the dtype of its inputs (FP64 in tests)."""

import torch


def forward(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, weight_offset: float, rounding: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, rstd); gradients come from autograd. The offset is 1 by definition of the operator."""
    rstd = (x.square().mean(-1) + eps).rsqrt()
    return x * rstd.unsqueeze(-1) * (1.0 + weight), rstd
