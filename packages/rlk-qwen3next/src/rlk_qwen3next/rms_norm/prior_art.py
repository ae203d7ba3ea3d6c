# SPDX-License-Identifier: Apache-2.0
"""Other libraries' functions of the same formula, for the benchmark."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlk.bench.variants import Peer


def in_torch(scalars: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """PyTorch's own function; an offset is added to the weight in front of it."""
    offset, eps = scalars["weight_offset"], scalars["eps"]

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        weight = weight + offset if offset else weight
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    return call


def in_liger(scalars: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """Liger, FP32 to the end, without writing dx into dy."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    offset, eps = scalars["weight_offset"], scalars["eps"]
    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, eps, offset, "gemma", False)


def in_flashinfer(scalars: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """FlashInfer, for inference: forward alone."""
    from flashinfer import norm

    function = norm.gemma_rmsnorm if scalars["weight_offset"] else norm.rmsnorm
    return lambda x, weight: function(x, weight, scalars["eps"])


PEERS = (
    Peer("F.rms_norm", "torch", in_torch),
    Peer("Liger", "liger-kernel", in_liger),
    Peer("FlashInfer", "flashinfer-python", in_flashinfer),
)
