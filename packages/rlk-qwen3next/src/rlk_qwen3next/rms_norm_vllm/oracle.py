# SPDX-License-Identifier: Apache-2.0
"""Which value is right: that of the IEEE rounding."""

from typing import Any

import torch

from ..rms_norm import oracle as plain


def forward(
    x: torch.Tensor, weight: torch.Tensor, **scalars: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, rstd); gradients come from autograd."""
    return plain.forward(x, weight, **scalars)
