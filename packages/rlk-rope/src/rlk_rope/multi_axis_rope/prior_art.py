# SPDX-License-Identifier: Apache-2.0
"""Other libraries' functions of the same formula, for the benchmark."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlk.bench.variants import Peer


def in_complex_numbers(scalars: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """PyTorch's product of complex64 tensors, as diffusers turns adjacent pairs."""

    def call(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        turned = pairs * torch.complex(cos, sin).unsqueeze(-2)
        return torch.view_as_real(turned).flatten(-2).type_as(x)

    return call


def in_flash_attention(scalars: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """flash-attention's Triton rotary embedding, on one sequence."""
    from flash_attn.layers.rotary import apply_rotary_emb

    interleaved = scalars["interleaved"]

    def call(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return apply_rotary_emb(x.unsqueeze(0), cos, sin, interleaved).squeeze(0)

    return call


def in_liger(scalars: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """Liger, which turns split pairs of a query and a key; the key here has one head."""
    from liger_kernel.ops.rope import LigerRopeFunction

    def call(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if scalars["interleaved"] or 2 * cos.shape[-1] != x.shape[-1]:
            raise ValueError("it turns split pairs of whole heads alone")
        angles = (torch.cat((t, t), -1).unsqueeze(0) for t in (cos, sin))
        query = x.unsqueeze(0).transpose(1, 2)
        return LigerRopeFunction.apply(query, query[:, :1].detach(), *angles)[0].transpose(1, 2)[0]

    return call


PEERS = (
    Peer("torch complex", "torch", in_complex_numbers),
    Peer("flash-attention", "flash-attn", in_flash_attention),
    Peer("Liger", "liger-kernel", in_liger),
)
