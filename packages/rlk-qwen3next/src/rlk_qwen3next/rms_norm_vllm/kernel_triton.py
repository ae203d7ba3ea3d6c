# SPDX-License-Identifier: Apache-2.0
"""Norms by the hardware's reciprocal root in Triton: a forward; the backward is rms_norm's.

check_ptx: allow rsqrt.approx.f32 (the rounding that these kernels are for)
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..rms_norm.device_triton import forward_rows
from ..rms_norm.kernel_triton import backward, run_forward

__all__ = ["backward", "forward", "rms_norm_vllm_forward"]


@triton.jit
def rms_norm_vllm_forward(
    x, residual, weight, y, residual_out, rstd_out, rows, n,
    x_row, x_column, residual_row, residual_column, weight_column, eps, weight_offset,
    RESIDUAL: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    forward_rows(
        x, residual, weight, y, residual_out, rstd_out, rows, n,
        x_row, x_column, residual_row, residual_column, weight_column, eps, weight_offset,
        RESIDUAL, True, ROWS, CHUNK,
    )  # fmt: skip


def forward(
    x: torch.Tensor, weight: torch.Tensor, **scalars: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [T, N], rstd [T])"""
    eps, offset = scalars["eps"], scalars["weight_offset"]
    y, _, rstd = run_forward(rms_norm_vllm_forward, x, None, weight, eps, offset)
    return y, rstd
