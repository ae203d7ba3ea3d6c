# SPDX-License-Identifier: Apache-2.0
"""Other libraries' functions of the same formula: those of the base with an offset of 1."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rlk.bench.variants import Peer

from ..rms_norm import prior_art as base

# Our functions, by the name of their rounding.
ROUNDINGS = {
    name: partial(function, weight_offset=1.0) for name, function in base.ROUNDINGS.items()
}


def _offset_by_one(peer: Peer) -> Peer:
    def make(scalars: Mapping[str, Any]) -> Callable[..., Any]:
        return peer.make({**scalars, "weight_offset": 1.0})

    return replace(peer, make=make)


def in_transformers(scalars: Mapping[str, Any]) -> Callable[..., Any]:
    """The class of the model's own code, which keeps FP32 to the end."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

    return base.of_module(lambda n: Qwen3NextRMSNorm(n, eps=scalars["eps"]))


def in_vllm(scalars: Mapping[str, Any]) -> Callable[..., Any]:
    """vLLM's zero-centred norm."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm

    def build(n: int) -> Any:
        with set_current_vllm_config(VllmConfig()):
            return GemmaRMSNorm(n, eps=scalars["eps"])

    return base.of_module(build)


def like_vllm(scalars: Mapping[str, Any]) -> Callable[..., Any]:
    """The steps of vLLM's zero-centred norm, compiled as it compiles them, for machines without it.

    Source: GemmaRMSNorm of vllm-project/vllm at 00cba797bda48c0413ff05ab3c699335a745d734,
    vllm/model_executor/layers/layernorm.py.
    """
    eps = scalars["eps"]

    @torch.compile
    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        mean_square = wide.pow(2).mean(dim=-1, keepdim=True)
        return (wide * torch.rsqrt(mean_square + eps) * (1.0 + weight.float())).to(x.dtype)

    return call


PEERS = (
    Peer("transformers", "transformers", in_transformers),
    *map(_offset_by_one, base.PEERS),
)
CONVENTIONS = (
    Peer("vLLM, GemmaRMSNorm", "vllm", in_vllm),
    Peer("vLLM, GemmaRMSNorm, reproduced", "torch", like_vllm),
)
