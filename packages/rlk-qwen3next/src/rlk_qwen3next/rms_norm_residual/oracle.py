# SPDX-License-Identifier: Apache-2.0
"""Which value is right: the textbook formula, in the dtype of its inputs (FP64 in tests)."""

from collections.abc import Callable
from typing import Any

import torch

from ..rms_norm import oracle as plain


def _as_it_is(value: torch.Tensor, **options: Any) -> torch.Tensor:
    """The cast of a formula that nobody rounds."""
    return value


def forward(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    cast: Callable[..., torch.Tensor] = _as_it_is,
    **scalars: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, residual_out, rstd); gradients come from autograd. `cast` rounds residual_out."""
    residual_out = cast(x + residual)
    y, rstd = plain.forward(residual_out, weight, **scalars)
    return y, residual_out, rstd
