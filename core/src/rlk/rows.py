# SPDX-License-Identifier: Apache-2.0
"""From caller's tensors to rows and back: what a backend sees of leading axes."""

from collections.abc import Sequence

import torch

from rlk.operator import Operator, Tensor


def as_rows(declared: Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its leading axes flattened to one, as a view wherever strides allow.

    Where they do not, the copy is made here, inside the operator: one made in front of it is a
    copy that a compiler may drop.
    """
    tensor = tensor.detach().resolve_neg()
    if not declared.has_rows:
        return tensor
    trailing = tensor.shape[tensor.dim() - len(declared.shape) + 1 :]
    # An explicit row count: -1 is ambiguous when a trailing axis is empty.
    rows = tensor.shape[: tensor.dim() - len(trailing)].numel()
    return tensor.reshape(rows, *trailing)


def from_rows(rows: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A backend's result in the caller's shape, contiguous whatever the backend made."""
    # Detached: autograd forbids its users to write into a view that a custom function returns.
    return rows.contiguous().view(shape).detach()


def inputs_as_rows(operator: Operator, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All inputs of an operator as its backends expect them."""
    return [as_rows(t, tensor) for t, tensor in zip(operator.inputs, tensors, strict=True)]


def are_views(rows: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether rows lie in the memory of their tensors, none of them a copy."""
    return all(
        t.layout == torch.strided and row.data_ptr() == t.data_ptr() != 0
        for row, t in zip(rows, tensors, strict=True)
    )
