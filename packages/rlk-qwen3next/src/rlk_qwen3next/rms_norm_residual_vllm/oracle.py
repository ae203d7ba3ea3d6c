# SPDX-License-Identifier: Apache-2.0
"""Which value is right: that of the IEEE rounding."""

from typing import Any

import torch

from ..rms_norm_residual import oracle as plain


def forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, residual_out, rstd); gradients come from autograd."""
    return plain.forward(x, residual, weight, **options)
