# SPDX-License-Identifier: Apache-2.0
"""Results of public functions, which may hand out one output of the operator in parts."""

from collections.abc import Sequence
from typing import Any

import torch


def tensors_in(results: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of a result: one, or those of tuples within tuples, in order."""
    if isinstance(results, torch.Tensor):
        return (results,)
    return tuple(tensor for part in results for tensor in tensors_in(part))


def cut_like(
    whole: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Gradients of whole outputs as gradients of the parts that a function handed out.

    Parts are of equal width, side by side along the last axis of one output.
    """
    if len(whole) == len(parts):
        return tuple(whole)
    (one,) = whole
    return one.chunk(len(parts), -1)
