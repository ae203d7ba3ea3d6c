# SPDX-License-Identifier: Apache-2.0
"""Other libraries' functions of the same formula, for the benchmark."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from rlk.bench.variants import Peer


def in_torch(scalars: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """The steps of diffusers' AdaLayerNormContinuous without affine parameters."""
    eps = scalars["eps"]

    def call(
        x: torch.Tensor, temb: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        scale, shift = functional.linear(functional.silu(temb), weight, bias).chunk(2, -1)
        normalised = functional.layer_norm(x, x.shape[-1:], eps=eps)
        return normalised * (1 + scale).unsqueeze(-2) + shift.unsqueeze(-2)

    return call


PEERS = (Peer("AdaLayerNormContinuous", "torch", in_torch),)
