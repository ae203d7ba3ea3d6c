# SPDX-License-Identifier: Apache-2.0
"""The autograd.Functions of a linear operator: each one's backward is the other."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlk.autograd import require_single_gradients
from rlk.errors import RlkError
from rlk.operator import Operator

if TYPE_CHECKING:
    from rlk.execution import Execution

# What a missing gradient is made from: shape and dtype.
Look = tuple[Sequence[int], torch.dtype]


def require_linear(operator: Operator) -> None:
    """Refuse a declaration whose linear outputs are unlike their inputs.

    Raises:
        RlkError: shapes or dtypes differ, or something else takes a gradient or is saved.
    """
    pairs = zip(operator.outputs, operator.inputs, strict=False)
    alike = all(o.shape == i.shape and o.dtype == (f"={i.name}",) for o, i in pairs)
    rows = [t.gradient == "row" for t in operator.inputs]
    count = len(operator.outputs)
    expected = [place < count for place in range(len(rows))]
    if not alike or rows != expected or operator.saved or operator.parameters:
        raise RlkError(
            f"{operator.name}: a linear operator must have outputs like its first inputs, which "
            "alone take gradients, and no saved state, got another declaration"
        )


def make_linear_functions(
    execution: "Execution",
) -> tuple[type[torch.autograd.Function], type[torch.autograd.Function]]:
    """The autograd.Functions of forward and backward.

    The first argument of both is the dispatch key set when the dispatcher called, or None on the
    eager path; the rest is the operator's schema.
    """
    operator = execution.operator
    count, inputs, scalars = len(operator.outputs), len(operator.inputs), len(operator.scalars)

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *arguments: Any) -> Any:
            results = execution.forward_pass(keyset, arguments)
            ctx.rest = arguments[inputs:]
            ctx.looks = _looks(arguments[:count])
            ctx.save_for_backward(*arguments[count:inputs])
            ctx.set_materialize_grads(False)
            return results

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            require_single_gradients(operator.name, gradients)
            *values, requested = ctx.rest
            given, needs = _filled(gradients, ctx.looks), ctx.needs_input_grad[1 : 1 + count]
            if torch.is_grad_enabled():
                places = [g.detach() for g in given]
                tensors = (*given, *places, *ctx.saved_tensors)
                found = execution.transpose(tensors, values, needs, requested)
            else:
                tensors = (*given, *given, *ctx.saved_tensors)
                found = execution.backward_pass(tensors, values, needs, requested)
            return None, *_wanted(found, needs), *(None,) * (inputs - count + scalars + 1)

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *arguments: Any) -> Any:
            results = execution.transpose_pass(keyset, arguments)
            tensors, ctx.scalars, needs = execution.split_backward(arguments)
            ctx.requested = arguments[-1]
            ctx.looks = _looks(tensors[:count])
            ctx.save_for_backward(*tensors[2 * count :])
            missing = [r for r, n in zip(results, needs, strict=True) if r is not None and not n]
            ctx.mark_non_differentiable(*missing)
            ctx.set_materialize_grads(False)
            return results

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            require_single_gradients(operator.name, gradients)
            given = _filled(gradients, ctx.looks)
            found = execution.apply((*given, *ctx.saved_tensors, *ctx.scalars, ctx.requested))
            wanted = ctx.needs_input_grad[1 : 1 + count]
            return None, *_wanted(found, wanted), *(None,) * (inputs + scalars + count + 1)

    Forward.__name__ = Forward.__qualname__ = operator.name
    Backward.__name__ = Backward.__qualname__ = f"{operator.name}_backward"
    return Forward, Backward


def _looks(tensors: Sequence[torch.Tensor]) -> list[Look]:
    return [(t.shape, t.dtype) for t in tensors]


def _filled(gradients: Sequence[Any], looks: Sequence[Look]) -> list[torch.Tensor]:
    """Gradients, with zeros for those on which nothing depends."""
    known = [g for g in gradients if g is not None]
    if len(known) == len(looks):
        return known
    return [
        known[0].new_zeros(shape, dtype=dtype) if g is None else g
        for g, (shape, dtype) in zip(gradients, looks, strict=True)
    ]


def _wanted(found: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    return [f if needed else None for f, needed in zip(found, needs, strict=True)]
