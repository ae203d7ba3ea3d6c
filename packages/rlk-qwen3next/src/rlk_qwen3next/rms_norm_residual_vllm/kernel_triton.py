# SPDX-License-Identifier: Apache-2.0
"""rms_norm_residual_vllm in Triton: the kernel of rms_norm_vllm, told to add."""

from typing import Any

import torch

from ..rms_norm.kernel_triton import run_forward
from ..rms_norm_residual.kernel_triton import backward
from ..rms_norm_vllm.kernel_triton import rms_norm_vllm_forward as kernel

__all__ = ["backward", "forward"]


def forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, **scalars: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y [T, N], residual_out [T, N], rstd [T])"""
    return run_forward(kernel, x, residual, weight, scalars["eps"], scalars["weight_offset"])
