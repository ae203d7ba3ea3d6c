# SPDX-License-Identifier: Apache-2.0
"""Memory of a call's results."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from rlk.operator import Tensor
from rlk.reduce.exact_sum.form import SumForm


def allocator(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Callable[[], torch.Tensor]:
    """Allocates one contiguous tensor at each call."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    # torch.empty takes twice as long to read its arguments.
    return partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)


def backward_results(
    differentiable: Sequence[tuple[Tensor, torch.Tensor]],
    shapes: Sequence[Sequence[int] | None],
    forms: Sequence[SumForm],
    device: torch.device,
    into: Sequence[torch.Tensor | None],
) -> tuple[list[Callable[[], torch.Tensor] | None], Callable[[Any], tuple[Any, ...]] | None]:
    """What allocates each pointer's memory, and, if that is not one each, what a call returns.

    Args:
        differentiable: the inputs with a gradient of their own, declared and in a call.
        shapes: of their gradients and states, None where not needed.
        forms: of exact sums.
        device: of all.
        into: memory of gradients of rows that is there already, or none.
    """
    empties: list[Callable[[], torch.Tensor] | None] = []
    picks: list[Callable[[Any], Any]] = []
    given = into or [None] * len(shapes)
    for (declared, tensor), shape, form, memory in zip(
        differentiable, shapes, forms, given, strict=True
    ):
        first = len(empties)
        picks.append(itemgetter(first))
        if declared.gradient != "parameter":
            made = None if shape is None else allocator(shape, tensor.dtype, device)
            empties.append(made if memory is None or shape is None else partial(_same, memory))
            continue
        empties += [None, None]
        if shape is None:
            continue
        # Of rounded sums too: what no level of a first pass takes may go to the state.
        dtype = torch.float64 if form == SumForm.CARRIED else torch.int64
        empties[first] = allocator(shape, dtype, device)
        if form != SumForm.STATE:
            empties[first + 1] = allocator(tensor.shape, tensor.dtype, device)
            picks[-1] = itemgetter(first, first + 1)
        if form == SumForm.ROUNDED:
            picks[-1] = itemgetter(first + 1)
    if len(empties) == len(picks):
        return empties, None
    return empties, lambda results: tuple([pick(results) for pick in picks])


def _same(memory: torch.Tensor) -> torch.Tensor:
    return memory
