# SPDX-License-Identifier: Apache-2.0
"""Other libraries' functions of the same formula, for the benchmark and for their roundings."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch

from rlk.bench.variants import Peer

from . import rms_norm

# Our functions, by the name of their rounding.
ROUNDINGS = {name: partial(rms_norm, rounding=name) for name in ("ieee", "vllm")}


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


def eps_alone(scalars: Mapping[str, Any]) -> float:
    """eps, for a function without an offset.

    Raises:
        ValueError: an offset is asked for.
    """
    if scalars["weight_offset"]:
        raise ValueError("it has no offset")
    return float(scalars["eps"])


def in_transformers(scalars: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """Llama's norm in transformers, which rounds the normalised rows before the weight."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    eps = eps_alone(scalars)
    return of_module(lambda n: LlamaRMSNorm(n, eps=eps))


def in_vllm(scalars: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """vLLM's compiled kernel."""
    from vllm import _custom_ops as kernels

    eps = eps_alone(scalars)

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        kernels.rms_norm(y, x, weight, eps)
        return y

    return call


def in_fla(scalars: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """flash-linear-attention's norm."""
    from fla.modules.layernorm import rms_norm as function

    eps = eps_alone(scalars)
    return lambda x, weight: function(x, weight, None, eps=eps)


def in_sglang(scalars: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """SGLang's norm in Triton."""
    from sglang.srt.layers.elementwise import fused_rmsnorm

    eps = eps_alone(scalars)
    return lambda x, weight: fused_rmsnorm(x, weight, eps)


def like_sglang(scalars: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """A kernel of ours with the operations of SGLang's, for machines without it."""
    from .kernel_triton_prior_art import divide_by_root

    eps = eps_alone(scalars)
    return lambda x, weight: divide_by_root(x, weight, eps)


def of_module(build: Callable[[int], torch.nn.Module]) -> Callable[..., torch.Tensor]:
    """A call of a module that `build` makes for the length of a row, with the weight put in."""

    made = cache(build)

    def call(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        *others, weight = rest
        given = {"weight": weight}
        found: torch.Tensor = torch.func.functional_call(made(len(weight)), given, (x, *others))
        return found

    return call


CONVENTIONS = (
    Peer("transformers, cast before the weight", "transformers", in_transformers),
    Peer("vLLM, compiled", "vllm", in_vllm),
    Peer("FLA", "fla-core", in_fla),
    Peer("SGLang, Triton", "sglang", in_sglang),
    Peer("SGLang, Triton, reproduced", "triton", like_sglang),
)
