# SPDX-License-Identifier: Apache-2.0
"""Other libraries' functions of the same formula: those of the base with an offset of 1."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

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


PEERS = (
    Peer("transformers", "transformers", in_transformers),
    *map(_offset_by_one, base.PEERS),
)
CONVENTIONS = (Peer("vLLM, GemmaRMSNorm", "vllm", in_vllm),)
