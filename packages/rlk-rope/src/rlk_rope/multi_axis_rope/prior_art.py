# SPDX-License-Identifier: Apache-2.0
"""Other libraries' functions of the same formula, for the benchmark.

flash-attention is rarely installed beside the newest PyTorch. Its schedule, written anew, takes
part in its place: as Triton compiles it, and with contraction off, which gives the bits of
rounding="separate".
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from rlk.bench.variants import Peer
from rlk.errors import BackendError


def in_complex_numbers(told: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """PyTorch's product of complex64 tensors, as diffusers turns adjacent pairs."""

    def call(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if not told["interleaved"] or 2 * cos.shape[-1] != x.shape[-1]:
            raise BackendError("it turns adjacent pairs of whole heads alone")
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        turned = pairs * torch.complex(cos, sin).unsqueeze(-2)
        return torch.view_as_real(turned).flatten(-2).type_as(x)

    return call


def in_diffusers(told: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """diffusers' own function, whose table all samples share."""
    from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

    def call(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if not told["interleaved"] or 2 * cos.shape[-1] != x.shape[-1]:
            raise BackendError("it turns adjacent pairs of whole heads alone")
        table = torch.complex(*shared(cos, sin))
        turned: torch.Tensor = apply_rotary_emb_qwen(x, table, use_real=False)
        return turned

    return call


def in_flash_attention(told: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """flash-attention's Triton rotary embedding, whose tables all samples share."""
    from flash_attn.layers.rotary import apply_rotary_emb

    interleaved = told["interleaved"]

    def call(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return apply_rotary_emb(x, *shared(cos, sin), interleaved)

    return call


def in_its_schedule(told: Mapping[str, Any], contraction: bool) -> Callable[..., torch.Tensor]:
    """Our reproduction of flash-attention's schedule, with or without contraction."""
    from .kernel_triton_prior_art import Rotary

    interleaved = told["interleaved"]

    def call(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return Rotary.apply(x, *shared(cos, sin), interleaved, contraction)

    return call


def shared(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables [1, S, P] of one sample as [S, P]."""
    return cos.squeeze(0), sin.squeeze(0)


PEERS = (
    Peer("torch complex", "torch", in_complex_numbers),
    Peer("diffusers", "diffusers", in_diffusers),
    Peer("flash-attention", "flash-attn", in_flash_attention),
    Peer("flash-attention, reproduced", "triton", partial(in_its_schedule, contraction=True)),
    Peer("reproduced, no contraction", "triton", partial(in_its_schedule, contraction=False)),
)
