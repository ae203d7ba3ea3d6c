# SPDX-License-Identifier: Apache-2.0
"""Other libraries' functions of the same formula, for the benchmark."""

from collections.abc import Callable, Mapping
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


PEERS = (Peer("F.layer_norm", "torch", in_torch),)
