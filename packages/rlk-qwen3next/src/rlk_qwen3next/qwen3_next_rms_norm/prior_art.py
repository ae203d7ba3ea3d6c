# SPDX-License-Identifier: Apache-2.0
"""Other libraries' functions of the same formula: those of the base with an offset of 1."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from rlk.bench.variants import Peer

from ..rms_norm import prior_art as base


def _offset_by_one(peer: Peer) -> Peer:
    def make(scalars: Mapping[str, Any]) -> Callable[..., Any]:
        return peer.make({**scalars, "weight_offset": 1.0})

    return replace(peer, make=make)


def in_transformers(scalars: Mapping[str, Any]) -> Callable[..., Any]:
    """The class of the model's own code, which keeps FP32 to the end."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

    made = cache(lambda width: Qwen3NextRMSNorm(width, scalars["eps"]))

    def call(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return torch.func.functional_call(made(x.shape[-1]), {"weight": weight}, (x,))

    return call


PEERS = (
    Peer("transformers", "transformers", in_transformers),
    *map(_offset_by_one, base.PEERS),
)
