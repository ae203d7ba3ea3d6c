# SPDX-License-Identifier: Apache-2.0
"""The modulated norms of diffusers' Qwen-Image, computed by our operators. Imports diffusers.

Each class keeps the name of its base: wrapping policies and diffusers' own lists go by it.
"""

from dataclasses import replace

import torch
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.models.normalization import AdaLayerNormContinuous as TheirAdaLayerNormContinuous
from diffusers.models.transformers import transformer_qwenimage as theirs
from torch import nn

import rlk_qwenimage
from rlk.errors import ArgumentError

from .parts import kind


class Linear(nn.Linear):
    """The projection of a modulation, which reads temb as it was before its SiLU."""

    exact_sums = rlk_qwenimage.ModulationLinear.exact_sums
    chain_sums = rlk_qwenimage.ModulationLinear.chain_sums
    bias_sum = None
    weight_chain = None
    forward = rlk_qwenimage.ModulationLinear.forward


class Sequential(nn.Sequential):
    """The SiLU and the projection of a modulation, in one call of the projection."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As its projection."""
        projection = self[1]
        if not isinstance(projection, Linear):
            # A layer put there later expects the output of the SiLU.
            raise ArgumentError(
                "Sequential: [1] must be the Linear that was patched, got "
                f"{kind(projection)}; unpatch the model before replacing its layers"
            )
        return projection(input)


class LayerNorm(nn.LayerNorm):
    """A norm of a block whose modulation also normalises: it hands on what it reads."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The same tensor."""
        return input


class QwenImageTransformerBlock(theirs.QwenImageTransformerBlock):
    """The block whose modulation also normalises."""

    def _modulate(
        self, x: torch.Tensor, mod_params: torch.Tensor, index: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if index is not None:
            raise ArgumentError(
                "QwenImageTransformerBlock: modulate_index must be None in a patched model, got a "
                f"{type(index).__name__}; unpatch it"
            )
        shift, scale, gate = mod_params.chunk(3, dim=-1)
        # As theirs promotes: under autocast the two may differ.
        dtype = torch.result_type(x, mod_params)
        out = rlk_qwenimage.layer_norm_modulate(
            x.to(dtype), scale.to(dtype), shift.to(dtype), self.img_norm1.eps
        )
        return out, gate.unsqueeze(1)


class AdaLayerNormContinuous(TheirAdaLayerNormContinuous):
    """The output norm."""

    exact_sums = rlk_qwenimage.AdaLayerNormContinuous.exact_sums
    chain_sums = rlk_qwenimage.AdaLayerNormContinuous.chain_sums
    bias_sum = None
    weight_chain = None
    forward = rlk_qwenimage.AdaLayerNormContinuous.forward


# By class: what diffusers' caches know of a block.
TransformerBlockRegistry.register(
    QwenImageTransformerBlock,
    replace(TransformerBlockRegistry.get(theirs.QwenImageTransformerBlock)),
)
