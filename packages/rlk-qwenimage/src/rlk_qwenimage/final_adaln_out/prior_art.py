# SPDX-License-Identifier: Apache-2.0
"""Other libraries' functions of the same formula, for the benchmark."""

from collections.abc import Callable, Mapping
from functools import cache
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


def in_diffusers(scalars: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """The class itself."""
    from diffusers.models.normalization import AdaLayerNormContinuous

    @cache
    def made(columns: int, width: int) -> torch.nn.Module:
        options = {"elementwise_affine": False, "eps": scalars["eps"]}
        module: torch.nn.Module = AdaLayerNormContinuous(columns, width, **options)
        return module

    def call(
        x: torch.Tensor, temb: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        module = made(x.shape[-1], temb.shape[-1])
        given = {"linear.weight": weight, "linear.bias": bias}
        result: torch.Tensor = torch.func.functional_call(module, given, (x, temb))
        return result

    return call


# In FP32, the formula would multiply without tensor cores.
COMPILED = in_torch
PEERS = (
    Peer("AdaLayerNormContinuous", "torch", in_torch),
    Peer("diffusers", "diffusers", in_diffusers),
)
