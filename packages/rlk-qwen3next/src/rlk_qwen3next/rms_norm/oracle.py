# SPDX-License-Identifier: Apache-2.0
"""Which value is right: the textbook formula, in the dtype of its inputs (FP64 in tests)."""

import torch


def forward(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, weight_offset: float, rounding: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, rstd); gradients come from autograd. `rounding` does not change the value."""
    # Adding an offset of 0 would turn a weight of -0.0 into +0.0.
    factor = weight if weight_offset == 0.0 else weight_offset + weight
    rstd = (x.square().mean(-1) + eps).rsqrt()
    return x * rstd.unsqueeze(-1) * factor, rstd
