# SPDX-License-Identifier: Apache-2.0
"""Other libraries' functions of the same formula, for the benchmark."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from rlk.bench.variants import Peer


def in_fla(scalars: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """flash-linear-attention, which the model's reference code calls where it is installed."""
    from fla.modules import fused_norm_gate

    function, activation, eps = (
        fused_norm_gate.rms_norm_gated,
        scalars["activation"],
        scalars["eps"],
    )

    def call(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return function(x, gate, weight, None, activation=activation, eps=eps)

    return call


def in_transformers(scalars: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """The class of the model's own code, which rounds before the weight."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    if scalars["activation"] != "silu" or scalars["weight_offset"]:
        raise ValueError("it has silu and no offset alone")
    made = cache(lambda width: Qwen3NextRMSNormGated(width, eps=scalars["eps"]))

    def call(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        given = {"weight": weight}
        result: torch.Tensor = torch.func.functional_call(made(x.shape[-1]), given, (x, gate))
        return result

    return call


PEERS = (
    Peer("transformers", "transformers", in_transformers),
    Peer("FLA", "fla-core", in_fla),
)
