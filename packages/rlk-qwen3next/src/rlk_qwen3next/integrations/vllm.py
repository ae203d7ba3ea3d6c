# SPDX-License-Identifier: Apache-2.0
"""Our norms in vLLM, through its registry of out-of-tree operators.

vLLM's zero-centred and gated norms, and its plain ones of rows longer than 2048, have no order that
a trainer could follow. Registered here, engine and trainer run the same kernels.

    from rlk_qwen3next.integrations import vllm
    vllm.register()  # before a model is built, in every process

or, as a plugin that vLLM loads into each of its processes, RLK_VLLM_NORMS=GemmaRMSNorm,RMSNormGated
in the environment of the engine.
"""

import os
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

from rlk.errors import ArgumentError, BackendError
from rlk_qwen3next.rms_norm import rms_norm
from rlk_qwen3next.rms_norm_gated import rms_norm_gated

__all__ = ["DEFAULT", "NORMS", "VARIABLE", "plugin", "register"]

# The environment variable that names what the plugin registers.
VARIABLE = "RLK_VLLM_NORMS"


def _zero_centred(base: type) -> type:
    class RlkGemmaRMSNorm(base):
        """`rms_norm` with an offset of 1: what `Qwen3NextRMSNorm` computes."""

        def forward_cuda(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            return rms_norm(x, self.weight, self.variance_epsilon, 1.0, residual=residual)

    return RlkGemmaRMSNorm


def _gated(base: type) -> type:
    class RlkRMSNormGated(base):
        """`rms_norm_gated`: what `Qwen3NextRMSNormGated` computes."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            if self.group_size not in (None, self.weight.numel()) or not self.norm_before_gate:
                raise BackendError(
                    "vllm: RMSNormGated must normalise whole rows before the gate, got "
                    f"group_size={self.group_size} and norm_before_gate={self.norm_before_gate}; "
                    "register without it"
                )

        def forward_cuda(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
            if z is None:
                return rms_norm(x, self.weight, self.eps)
            # Before there was a choice it was silu.
            activation = getattr(self, "activation", "silu")
            return rms_norm_gated(x, z, self.weight, self.eps, activation)

    return RlkRMSNormGated


def _plain(base: type) -> type:
    class RlkRMSNorm(base):
        """`rms_norm` with rounding="vllm": vLLM's own bits up to N = 2048, and ours beyond."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            if self.variance_size_override is not None or not self.has_weight:
                raise BackendError(
                    "vllm: RMSNorm must have a weight and take the mean over whole rows, got "
                    f"has_weight={self.has_weight} and "
                    f"var_hidden_size={self.variance_size_override}; register without it"
                )

        def forward_cuda(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            eps = self.variance_epsilon
            return rms_norm(x, self.weight, eps, residual=residual, rounding="vllm")

    return RlkRMSNorm


# By the names of vLLM's classes.
NORMS: dict[str, Callable[[type], type]] = {
    "GemmaRMSNorm": _zero_centred,
    "RMSNormGated": _gated,
    "RMSNorm": _plain,
}
DEFAULT = ("GemmaRMSNorm", "RMSNormGated")


def register(names: Iterable[str] = DEFAULT) -> tuple[str, ...]:
    """Have vLLM build our norms in the place of its own, from now on and in this process.

    Args:
        names: of vLLM's classes; "RMSNorm" too where rows are longer than 2048.
    Returns:
        Those registered by this call; others were ours already.
    Raises:
        ArgumentError: a name is none of `NORMS`.
        BackendError: another plugin has registered one of them.
        ImportError: vLLM is not installed.
    """
    wanted = tuple(names)
    for name in wanted:
        if name not in NORMS:
            raise ArgumentError(f"vllm: names must be among {', '.join(NORMS)}, got {name!r}")
    from vllm.model_executor import custom_op
    from vllm.model_executor.layers import layernorm

    added = []
    for name in wanted:
        present = _registry(custom_op).get(name)
        if present is None:
            ours = NORMS[name](getattr(layernorm, name))
            # Called where custom operators are off too, as under vLLM's compiler.
            ours.forward_native = ours.forward_oot = ours.forward_cuda  # type: ignore[attr-defined]
            custom_op.CustomOp.register_oot(_decorated_op_cls=ours, name=name)
            added.append(name)
        elif present.__module__ != __name__:
            raise BackendError(
                f"vllm: {name} must be free to register, got {present.__qualname__} of "
                f"{present.__module__}"
            )
    return tuple(added)


def plugin() -> None:
    """What vLLM calls in each of its processes: registers what the environment names, if anything.

    An installed package alone must not change what an engine computes.
    """
    named = [name.strip() for name in os.environ.get(VARIABLE, "").split(",")]
    wanted = [name for name in named if name]
    if wanted:
        register(wanted)


def _registry(custom_op: ModuleType) -> dict[str, type]:
    """Where vLLM keeps out-of-tree operators: in the module, or earlier in the class."""
    found = getattr(custom_op, "op_registry_oot", None)
    registry: dict[str, type] = custom_op.CustomOp.op_registry_oot if found is None else found
    return registry
