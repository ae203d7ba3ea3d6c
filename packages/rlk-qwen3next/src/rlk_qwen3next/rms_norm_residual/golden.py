# SPDX-License-Identifier: Apache-2.0
"""Which bits are right: FP32 in the written order, each operation rounded once."""

from typing import Any

import torch

from rlk.launch import start_golden

from ..rms_norm import golden as plain


def rounded_sum(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """x + residual, rounded once to their dtype: what the norm reads."""
    return (x.float() + residual.float()).to(x.dtype)


def forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, **scalars: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y [T, N], residual_out [T, N], rstd [T])"""
    start_golden("rms_norm_residual_forward", __file__)
    residual_out = rounded_sum(x, residual)
    y, rstd = plain.normalise(residual_out, weight, scalars["eps"], scalars["weight_offset"])
    return y, residual_out, rstd


def backward(
    dy: torch.Tensor,
    dresidual_out: torch.Tensor,
    residual_out: torch.Tensor,
    _: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    *,
    needs: frozenset[str],
    **scalars: Any,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx [T, N], which is dresidual too, exact state of dweight [13, N])"""
    start_golden("rms_norm_residual_backward", __file__)
    gradient, state = plain.gradients(
        dy, residual_out, weight, rstd, scalars["weight_offset"], needs
    )
    if gradient is None:
        return None, state
    return (gradient + dresidual_out.float()).to(residual_out.dtype), state
