# SPDX-License-Identifier: Apache-2.0
"""Declared casts in the oracle: values between the steps that are rounded as part of the formula.

Which way a value next to the middle of two numbers is rounded depends on its last bits, which are
nobody's to promise in FP32. The oracle therefore goes on from the number that the candidate has,
where it is known: later steps are judged given it, and the number is judged for itself.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from rlk.errors import RlkError
from rlk.operator import Operator


def names_of(operator: Operator) -> set[str]:
    """The declared casts and their gradients, as records name them."""
    return {name for cast in operator.casts for name in (cast, f"d{cast}")}


class Casts:
    """What an oracle rounds declared casts with: the `cast` of one call.

    `given` are the candidate's values by name, and those of gradients as `dmod`; what is missing
    is rounded here. `exact` holds what they all were before they were rounded.
    """

    def __init__(
        self, operator: Operator, dtype: torch.dtype, given: Mapping[str, torch.Tensor]
    ) -> None:
        self.exact: dict[str, torch.Tensor] = {}
        self._operator = operator
        self._names = iter(operator.casts)
        self._dtype = dtype
        self._given = given

    def __call__(self, value: torch.Tensor, *, gradient: bool = False) -> torch.Tensor:
        """The rounded value, whose gradient is rounded too if asked."""
        name = next(self._names, None)
        if name is None:
            declared = ", ".join(self._operator.casts)
            raise RlkError(f"{self._operator.name}: oracle must cast {declared} alone, got more")
        rounded = self._rounded(name, value)
        on_gradient = partial(self._rounded, f"d{name}") if gradient else None
        cast: torch.Tensor = _Cast.apply(value, rounded, on_gradient)
        return cast

    def _rounded(self, name: str, value: torch.Tensor) -> torch.Tensor:
        value = value.detach()
        self.exact[name] = value
        given = self._given.get(name)
        # One of another shape is a fault of its own.
        if given is None or given.shape != value.shape:
            given = value.to(self._dtype)
        return given.detach().cpu().to(value.dtype)


def cast_to(dtype: torch.dtype) -> Any:
    """A `cast` that rounds every value to `dtype`, and its gradient if asked."""

    def rounded(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype).to(value.dtype)

    def cast(value: torch.Tensor, *, gradient: bool = False) -> torch.Tensor:
        found: torch.Tensor = _Cast.apply(value, rounded(value), rounded if gradient else None)
        return found

    return cast


class _Cast(torch.autograd.Function):
    """Puts a rounded value in place, and lets the gradient through or rounds it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, rounded: torch.Tensor, on_gradient: Any) -> Any:
        ctx.on_gradient = on_gradient
        return rounded.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient if ctx.on_gradient is None else ctx.on_gradient(gradient), None, None
