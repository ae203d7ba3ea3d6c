# SPDX-License-Identifier: Apache-2.0
"""Other libraries' functions of the same formula, for the benchmark and for their roundings."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlk.bench.variants import Peer

from ..rms_norm.prior_art import eps_alone, of_module
from . import rms_norm_gated

# Our function, by the name of its rounding.
ROUNDINGS = {"ieee": rms_norm_gated}


def silu_alone(scalars: Mapping[str, Any]) -> float:
    """eps, for a function of silu and without an offset.

    Raises:
        ValueError: another activation or an offset is asked for.
    """
    if scalars["activation"] != "silu":
        raise ValueError("it has silu alone")
    return eps_alone(scalars)


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

    eps = silu_alone(scalars)
    return of_module(lambda n: Qwen3NextRMSNormGated(n, eps=eps))


def in_vllm(scalars: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """vLLM's copy of the gated norm in Triton."""
    from vllm.model_executor.layers.fla.ops.layernorm_guard import rmsnorm_fn

    eps = silu_alone(scalars)

    def call(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = rmsnorm_fn(x, weight, None, z=gate, eps=eps, norm_before_gate=True)
        return found

    return call


def in_fla_by_rows(scalars: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """flash-linear-attention's older function, which vLLM's began as: a row for each program."""
    from fla.modules.layernorm_gated import rmsnorm_fn

    eps = silu_alone(scalars)
    return lambda x, gate, weight: rmsnorm_fn(x, weight, None, z=gate, eps=eps)


def like_vllm(scalars: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """A kernel of ours with the operations of vLLM's, for machines without it."""
    from .kernel_triton_prior_art import norm_then_gate

    eps = silu_alone(scalars)
    return lambda x, gate, weight: norm_then_gate(x, gate, weight, eps)


PEERS = (
    Peer("transformers, cast before the weight", "transformers", in_transformers),
    Peer("FLA", "fla-core", in_fla),
)
CONVENTIONS = (
    Peer("FLA, rmsnorm_fn", "fla-core", in_fla_by_rows),
    Peer("vLLM, RMSNormGated", "vllm", in_vllm),
    Peer("vLLM, RMSNormGated, reproduced", "triton", like_vllm),
)
