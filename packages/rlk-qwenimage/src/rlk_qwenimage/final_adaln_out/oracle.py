# SPDX-License-Identifier: Apache-2.0
"""Which value is right: the textbook formula, in the dtype of its inputs (FP64 in tests)."""

from collections.abc import Callable

import torch

from ..adaln_mod_projection import oracle as projection
from ..layer_norm_modulate import oracle as norm


def forward(
    x: torch.Tensor,
    temb: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    eps: float,
    cast: Callable[..., torch.Tensor] = projection.as_it_is,
) -> tuple[torch.Tensor, ...]:
    """(out, act, mod, mean, rstd); gradients come from autograd. `cast` rounds act and mod."""
    mod, act = projection.forward(temb, weight, bias, cast=cast)
    mod = cast(mod, gradient=True)
    out, mean, rstd = norm.forward(x, *mod.chunk(2, -1), eps=eps)
    return out, act, mod, mean, rstd
