# SPDX-License-Identifier: Apache-2.0
"""Which bits are right: FP32 in the written order, each operation rounded once."""

import torch

from rlk.launch import start_golden
from rlk.math.golden import divide, sqrt
from rlk.reduce import exact_sum
from rlk.reduce.row_sum.golden import row_dot


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """rstd of FP32 rows [T, N]: the one piece of code every RMS norm takes it from."""
    mean_square = divide(row_dot(x, x), torch.full_like(x[:, 0], x.shape[1]))
    root = sqrt(mean_square + torch.full_like(mean_square, eps))
    return divide(torch.ones_like(root), root)  # [T]


def offset_weight(weight: torch.Tensor, weight_offset: float) -> torch.Tensor:
    """FP32 weight plus offset; an offset of 0 adds nothing, so that -0.0 keeps its sign."""
    weight = weight.float()
    # The comparison is made in FP32 too: a smaller FP64 offset is 0 to a kernel.
    offset = torch.full_like(weight, weight_offset)
    return torch.where(offset == 0.0, weight, offset + weight)


def input_gradient(g: torch.Tensor, xhat: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """dx = rstd * (g - xhat * m), m = dot(g, xhat) / N, of FP32 rows [T, N]."""
    m = divide(row_dot(g, xhat), torch.full_like(rstd, g.shape[1]))
    return rstd[:, None] * (g - xhat * m[:, None])


def column_sums(contributions: torch.Tensor) -> torch.Tensor:
    """Exact state [13, N] of the sums over FP32 rows [T, N]."""
    empty = exact_sum.new(contributions.shape[1], contributions.device)
    return exact_sum.add_rows(empty, contributions, backend="golden")


def normalise(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [T, N] in the dtype of x, rstd [T])"""
    rows = x.float()
    rstd = inverse_rms(rows, eps)
    y = rows * rstd[:, None] * offset_weight(weight, weight_offset)
    return y.to(x.dtype), rstd


def gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    weight_offset: float,
    needs: frozenset[str],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx [T, N] in FP32, exact state of dweight [13, N])"""
    dy32 = dy.float()
    xhat = x.float() * rstd[:, None]
    dx = state = None
    if "x" in needs:
        dx = input_gradient(dy32 * offset_weight(weight, weight_offset), xhat, rstd)
    if "weight" in needs:
        state = column_sums(dy32 * xhat)
    return dx, state


def forward(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, weight_offset: float, rounding: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [T, N], rstd [T])"""
    start_golden("rms_norm_forward", __file__)
    return normalise(x, weight, eps, weight_offset)


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    *,
    eps: float,
    weight_offset: float,
    rounding: str,
    needs: frozenset[str],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx [T, N], exact state of dweight [13, N])"""
    start_golden("rms_norm_backward", __file__)
    dx, state = gradients(dy, x, weight, rstd, weight_offset, needs)
    return None if dx is None else dx.to(x.dtype), state
