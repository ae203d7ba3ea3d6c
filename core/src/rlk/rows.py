# SPDX-License-Identifier: Apache-2.0
"""From caller's tensors to rows and back: what a backend sees of leading axes."""

from collections.abc import Sequence

import torch

from rlk.arguments import output_dtype, output_shape
from rlk.operator import Operator, Tensor
from rlk.reduce.exact_sum import STATE_ROWS


def as_rows(
    operator: Operator, declared: Sequence[Tensor], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Tensors with their leading axes brought to `row_axes`, as views wherever strides allow.

    Where they do not, the copy is made here, inside the operator: one made in front of it is a
    copy that a compiler may drop.
    """
    axes = len(operator.row_axes)
    return [_as_rows(d, t, axes) for d, t in zip(declared, tensors, strict=True)]


def _as_rows(declared: Tensor, tensor: torch.Tensor, axes: int) -> torch.Tensor:
    tensor = tensor.detach().resolve_neg()
    if not declared.has_rows:
        return tensor
    leading = tensor.dim() - len(declared.shape) + 1
    if leading == axes:
        return tensor
    outer = max(leading - axes + 1, 0)
    # An explicit row count: -1 is ambiguous when a trailing axis is empty.
    counted = [tensor.shape[:outer].numel(), *tensor.shape[outer:]]
    return tensor.reshape(*[1] * (axes - leading - 1), *counted)


def are_views(rows: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether rows lie in the memory of their tensors, none of them a copy."""
    # Detached, as rows are: a wrapper that torch.func left behind has no memory of its own.
    return all(
        t.layout == torch.strided and row.data_ptr() == t.detach().data_ptr() != 0
        for row, t in zip(rows, tensors, strict=True)
    )


def from_rows(rows: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A backend's result in the caller's shape, contiguous whatever the backend made."""
    rows = rows.contiguous()
    # Detached: autograd forbids its users to write into a view that a custom function returns.
    return (rows if rows.shape == shape else rows.view(shape)).detach()


def gradient_shape(declared: Tensor, tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of an input's gradient as backward returns it, finished or an exact state."""
    state = (STATE_ROWS,) if declared.gradient == "parameter" else ()
    return (*state, *tensor.shape)


def empty_outputs(operator: Operator, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Uninitialised outputs and saved state of the right shapes, dtypes and strides."""
    return tuple(
        tensors[0].new_empty(
            output_shape(operator, declared, tensors),
            dtype=output_dtype(operator, declared, tensors),
        )
        for declared in operator.outputs + operator.saved
    )


def empty_gradients(
    operator: Operator,
    tensors: Sequence[torch.Tensor],
    needs: Sequence[bool],
    chained: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Zero gradients and states; size 0 for those not needed.

    `tensors` are those of a backward call. A row without tokens has gradients that are sums of
    nothing. Of a `chained` call the last tensor is where the chain over rows stays.
    """
    _, inputs = operator.split_backward(tensors)
    found = []
    for (place, *_), needed in zip(operator.shared_gradients, needs, strict=True):
        declared, tensor = operator.inputs[place], inputs[place]
        if chained and declared.gradient == "chain":
            found.append(tensors[-1].clone())
            continue
        shape = gradient_shape(declared, tensor) if needed else (0,)
        dtype = torch.int64 if declared.gradient == "parameter" else tensor.dtype
        found.append(tensor.new_zeros(shape, dtype=dtype))
    return tuple(found)
