# SPDX-License-Identifier: Apache-2.0
"""rms_norm_residual in Triton: the kernels of rms_norm, told to add."""

from typing import Any

import torch

from ..rms_norm.kernel_triton import rms_norm_forward as kernel
from ..rms_norm.kernel_triton import run_backward, run_forward


def forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, **scalars: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y [T, N], residual_out [T, N], rstd [T])"""
    return run_forward(kernel, x, residual, weight, scalars["eps"], scalars["weight_offset"])


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
    offset = scalars["weight_offset"]
    return run_backward(dy, dresidual_out, residual_out, weight, rstd, offset, needs)
