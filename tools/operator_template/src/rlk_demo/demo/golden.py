# SPDX-License-Identifier: Apache-2.0
"""Which bits are right: FP32 in the written order, each operation rounded once."""

import torch

from rlk.launch import start_golden
from rlk.math.golden import divide
from rlk.reduce import exact_sum
from rlk.reduce.row_sum.golden import row_dot


def row_damping(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + sum(x^2) / N) of FP32 rows [T, N]."""
    mean_square = divide(row_dot(x, x), torch.full_like(x[:, 0], x.shape[1]))
    one = torch.ones_like(mean_square)
    return divide(one, one + mean_square)  # [T]


def input_gradient(g: torch.Tensor, xhat: torch.Tensor, damping: torch.Tensor) -> torch.Tensor:
    """dx = damping * g - xhat * 2 m, m = dot(g, xhat) / N, of FP32 rows [T, N]."""
    m = divide(row_dot(g, xhat), torch.full_like(damping, g.shape[1]))
    return damping[:, None] * g - xhat * (m + m)[:, None]


def forward(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [T, N], damping [T])"""
    start_golden("demo_forward", __file__)
    rows = x.float()
    damping = row_damping(rows)
    y = rows * damping[:, None] * weight.float()
    return y.to(x.dtype), damping


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    damping: torch.Tensor,
    *,
    needs: frozenset[str],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx [T, N], exact state of dweight [13, N])"""
    start_golden("demo_backward", __file__)
    dy32 = dy.float()
    xhat = x.float() * damping[:, None]
    dx = state = None
    if "x" in needs:
        dx = input_gradient(dy32 * weight.float(), xhat, damping).to(x.dtype)
    if "weight" in needs:
        empty = exact_sum.new(x.shape[1], x.device)
        state = exact_sum.add_rows(empty, dy32 * xhat, backend="golden")
    return dx, state
