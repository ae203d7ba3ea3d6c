# SPDX-License-Identifier: Apache-2.0
"""Other libraries' functions of the same formula, for the benchmark."""

from collections.abc import Callable, Mapping
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


PEERS = (Peer("FLA", "fla-core", in_fla),)
