# SPDX-License-Identifier: Apache-2.0
"""Other libraries' functions of the same formula, for the benchmark and for their roundings."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from rlk.bench.variants import Peer

from ..rms_norm import rms_norm as norm
from ..rms_norm.prior_art import eps_alone
from ..rms_norm.prior_art import in_torch as plain_in_torch


def ours(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, rounding: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Our function, its inputs in the order of the declaration."""
    return norm(x, weight, residual=residual, rounding=rounding)


# By the name of their rounding.
ROUNDINGS = {name: partial(ours, rounding=name) for name in ("ieee", "vllm")}


def in_torch(scalars: Mapping[str, Any]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A sum and PyTorch's own norm of it: two passes."""
    plain = plain_in_torch(scalars)

    def call(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        total = x + residual
        return plain(total, weight), total

    return call


def in_liger(scalars: Mapping[str, Any]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Liger, FP32 behind the rounded sum, without writing dx into dy."""
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    offset, eps = scalars["weight_offset"], scalars["eps"]

    def call(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = LigerFusedAddRMSNormFunction.apply(
            x, residual, weight, eps, offset, "gemma", False
        )
        return found

    return call


def in_vllm(scalars: Mapping[str, Any]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """vLLM's compiled kernel, which writes over its inputs: it gets copies."""
    from vllm import _custom_ops as kernels

    eps = eps_alone(scalars)

    def call(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        y, total = x.clone(), residual.clone()
        kernels.fused_add_rms_norm(y, total, weight, eps)
        return y, total

    return call


PEERS = (
    Peer("sum, then norm", "torch", in_torch),
    Peer("Liger", "liger-kernel", in_liger),
)
CONVENTIONS = (Peer("vLLM, compiled", "vllm", in_vllm),)
