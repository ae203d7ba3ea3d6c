# SPDX-License-Identifier: Apache-2.0
"""The output norm as a module."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from rlk.arguments import check_scalars, check_sizes
from rlk.errors import ArgumentError
from rlk.operator import Operator

from ..autocast import as_autocast
from . import _published
from .operator import OPERATOR


class AdaLayerNormContinuous(nn.Module):
    """`final_adaln_out` with its projection, constructed and stored as in diffusers.

    Args:
        embedding_dim: H, the length of a row.
        conditioning_embedding_dim: K, the length of a conditioning row.
        elementwise_affine: must be False: scale and shift come from the conditioning alone.
        eps: added to the variance; unitless.
        bias: must be True.
        norm_type: must be "layer_norm".
    Raises:
        ArgumentError: an argument asks for what the operator does not compute, or a size is below
            1.
    """

    operator: ClassVar[Operator] = OPERATOR
    exact_sums: ClassVar[Mapping[str, str]] = {"linear.bias": "bias_sum"}
    chain_sums: ClassVar[Mapping[str, str]] = {"linear.weight": "weight_chain"}
    bias_sum: torch.Tensor | None = None
    weight_chain: tuple[torch.Tensor, torch.Tensor] | None = None

    def __init__(
        self,
        embedding_dim: int,
        conditioning_embedding_dim: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        bias: bool = True,
        norm_type: str = "layer_norm",
    ) -> None:
        check_sizes(
            "AdaLayerNormContinuous",
            embedding_dim=embedding_dim,
            conditioning_embedding_dim=conditioning_embedding_dim,
        )
        given = {"elementwise_affine": elementwise_affine, "bias": bias, "norm_type": norm_type}
        for name, wanted in COMPUTED.items():
            if given[name] != wanted:
                raise ArgumentError(
                    f"AdaLayerNormContinuous: {name} must be {wanted!r}, got {given[name]!r}; "
                    f"pass {name}={wanted!r}"
                )
        check_scalars(OPERATOR, {"eps": eps})
        super().__init__()
        self.silu = nn.SiLU()
        self.linear = nn.Linear(conditioning_embedding_dim, embedding_dim * 2)
        self.norm = nn.LayerNorm(embedding_dim, eps, elementwise_affine=False)

    def forward(self, x: torch.Tensor, conditioning_embedding: torch.Tensor) -> torch.Tensor:
        """The normalised, modulated tokens of x [B, S, H], by conditioning_embedding [B, K]."""
        if not isinstance(self.linear, nn.Linear):
            # An adapter computes more than its weight says.
            raise ArgumentError(
                "AdaLayerNormContinuous: linear must be a torch.nn.Linear, got "
                f"{type(self.linear).__name__}; unpatch the model before replacing its layers"
            )
        temb = conditioning_embedding.to(x.dtype)
        x, temb, weight, bias = as_autocast(x, temb, self.linear.weight, self.linear.bias)
        carriers = (self.bias_sum, *(self.weight_chain or ()))
        (out,) = _published((x, temb, weight, bias), {"eps": self.norm.eps}, None, carriers)
        return out


# What diffusers offers beside it has a weight or no mean, which the operator does not know.
COMPUTED = {"elementwise_affine": False, "bias": True, "norm_type": "layer_norm"}
