# SPDX-License-Identifier: Apache-2.0
"""Which value is right: the textbook formula, in the dtype of its inputs (FP64 in tests)."""

from collections.abc import Callable
from typing import Any

import torch


def as_it_is(value: torch.Tensor, **options: Any) -> torch.Tensor:
    """The cast of a formula that nobody rounds."""
    return value


def forward(
    temb: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    cast: Callable[..., torch.Tensor] = as_it_is,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mod, act); gradients come from autograd. `cast` rounds act to the dtype of temb."""
    act = cast(torch.nn.functional.silu(temb))
    return act @ weight.T + bias, act
