# SPDX-License-Identifier: Apache-2.0
"""Which bits are right: FP32 in the written order, each operation rounded once."""

import torch

from rlk.launch import start_golden
from rlk.math import golden as math

from ..rms_norm.golden import column_sums, input_gradient, inverse_rms, offset_weight

_ACTIVATION = {"silu": math.silu, "sigmoid": math.sigmoid}
_DERIVATIVE = {"silu": math.silu_derivative, "sigmoid": math.sigmoid_derivative}


def forward(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    activation: str,
    weight_offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [T, N], rstd [T])"""
    start_golden("rms_norm_gated_forward", __file__)
    rows = x.float()
    rstd = inverse_rms(rows, eps)
    y = rows * rstd[:, None] * offset_weight(weight, weight_offset)
    return (y * _ACTIVATION[activation](gate.float())).to(x.dtype), rstd


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    *,
    eps: float,
    activation: str,
    weight_offset: float,
    needs: frozenset[str],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(dx [T, N], dgate [T, N], exact state of dweight [13, N])"""
    start_golden("rms_norm_gated_backward", __file__)
    dy32, gate32 = dy.float(), gate.float()
    xhat = x.float() * rstd[:, None]
    factor = offset_weight(weight, weight_offset)
    act = _ACTIVATION[activation](gate32)
    dx = dgate = state = None
    if "x" in needs:
        dx = input_gradient(dy32 * factor * act, xhat, rstd).to(x.dtype)
    if "gate" in needs:
        dgate = (dy32 * xhat * factor * _DERIVATIVE[activation](gate32)).to(x.dtype)
    if "weight" in needs:
        state = column_sums(dy32 * xhat * act)
    return dx, dgate, state
