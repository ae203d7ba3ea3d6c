# SPDX-License-Identifier: Apache-2.0
"""Other libraries' functions of the same formula, for the benchmark."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from rlk.bench.variants import Peer


def in_torch(scalars: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """PyTorch's layer norm and the modulation behind it, as diffusers writes both."""
    eps = scalars["eps"]

    def call(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        normalised = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps)
        return normalised * (1 + scale.unsqueeze(-2)) + shift.unsqueeze(-2)

    return call


def in_liger(scalars: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """Liger's layer norm, which has a weight and a bias, and the modulation behind it."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    eps = scalars["eps"]

    @cache
    def affine(n: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
        return torch.ones(n, dtype=dtype, device=device), torch.zeros(n, dtype=dtype, device=device)

    def call(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        weight, bias = affine(x.shape[-1], x.dtype, x.device)
        normalised: torch.Tensor = LigerLayerNormFunction.apply(x, weight, bias, eps)
        return normalised * (1 + scale.unsqueeze(-2)) + shift.unsqueeze(-2)

    return call


PEERS = (
    Peer("F.layer_norm", "torch", in_torch),
    Peer("Liger", "liger-kernel", in_liger),
)
