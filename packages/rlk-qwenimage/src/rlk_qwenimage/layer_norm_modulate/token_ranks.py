# SPDX-License-Identifier: Apache-2.0
"""layer_norm_modulate where the tokens of a sample live on several ranks.

The sums over tokens are then parts of sums. Their exact states are added over the ranks as
integers, and rounded after that, so every rank has the gradients of the whole sample. An operator
of torch of its own, whose backward holds the collective: autograd and compilers see both.
"""

from types import ModuleType
from typing import Any

import torch

from rlk import backends
from rlk.autograd import first_order_only
from rlk.dispatch import Primitive, choose
from rlk.launch import operator_call
from rlk.reduce.exact_sum import STATE_ROWS

_NAME = "layer_norm_modulate"
_SCHEMA = (
    "(Tensor x, Tensor scale, Tensor shift, float eps, str group, str backend)"
    " -> (Tensor out, Tensor mean, Tensor rstd)"
)
_STATES_SCHEMA = (
    "(Tensor dout, Tensor x, Tensor mean, Tensor rstd, bool need_scale, bool need_shift,"
    " str backend) -> Tensor"
)


def _load_triton() -> ModuleType:
    from . import kernel_triton

    return kernel_triton


def _load_golden() -> ModuleType:
    from . import golden

    return golden


# CUDA's kernel keeps its states to itself, or has none: where it runs the norm, Triton sums.
_STATES = Primitive(
    f"{_NAME} with token_group", (backends.triton(_load_triton), backends.golden(_load_golden))
)


@torch.library.custom_op(f"rlk::{_NAME}_token_states", mutates_args=(), schema=_STATES_SCHEMA)
def token_states(
    dout: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    need_scale: bool,
    need_shift: bool,
    backend: str,
) -> torch.Tensor:
    """The exact states [13, T * N] of dscale and dshift, those that are needed side by side."""
    *leading, tokens, n = x.shape
    samples = torch.Size(leading).numel()
    needs = [name for name, need in (("scale", need_scale), ("shift", need_shift)) if need]
    if samples * tokens == 0:
        return x.new_zeros(STATE_ROWS, len(needs) * samples * n, dtype=torch.int64)
    module = choose(_STATES, x.device, backend).module
    rows = (t.detach().resolve_neg().reshape(samples, tokens, n) for t in (dout, x))
    statistics = (t.detach().reshape(samples, tokens) for t in (mean, rstd))
    with operator_call(_NAME, "backward"):
        return torch.cat(module.token_states(*rows, *statistics, frozenset(needs)), 1)


@token_states.register_fake
def _(
    dout: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    need_scale: bool,
    need_shift: bool,
    backend: str,
) -> torch.Tensor:
    *leading, _, n = x.shape
    columns = (need_scale + need_shift) * torch.Size(leading).numel() * n
    return x.new_empty(STATE_ROWS, columns, dtype=torch.int64)


@torch.library.custom_op(f"rlk::{_NAME}_token_ranks", mutates_args=(), schema=_SCHEMA)
def over_ranks(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float, group: str, backend: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operator of this rank's tokens: a token needs no other one."""
    return torch.ops.rlk.layer_norm_modulate(x, scale, shift, eps, backend)


@over_ranks.register_fake
def _(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float, group: str, backend: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ops.rlk.layer_norm_modulate(x, scale, shift, eps, backend)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.eps, ctx.group, ctx.backend = inputs
    _, mean, rstd = output
    ctx.save_for_backward(*tensors, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    x, scale, shift, mean, rstd = ctx.saved_tensors
    need_x, *needed = ctx.needs_input_grad[:3]
    dx = None
    gradients: list[torch.Tensor | None] = [None, None]
    with torch.no_grad():
        if need_x:
            given = (dout, x, scale, shift, mean, rstd, ctx.eps)
            dx, _, _ = torch.ops.rlk.layer_norm_modulate_backward(
                *given, True, False, False, ctx.backend
            )
        if any(needed):
            states = token_states(dout, x, mean, rstd, *needed, ctx.backend)
            # In this order: a state is whole before it is rounded.
            states = added(states, ctx.group)
            sums = torch.ops.rlk.exact_sum_round(states, scale.dtype, ctx.backend)
            parts = iter(sums.view(sum(needed), *scale.shape).unbind())
            gradients = [next(parts).clone() if need else None for need in needed]
    finished = first_order_only(_NAME, [dx, *gradients], (dout, *ctx.saved_tensors))
    return *finished, None, None, None


def added(states: torch.Tensor, group: str) -> torch.Tensor:
    """The states of all ranks of a group, added elementwise."""
    # As the functional collectives of torch do it, which are graph nodes to compilers.
    return torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce(states, "sum", group)
    )


over_ranks.register_autograd(_backward, setup_context=_keep)
