# SPDX-License-Identifier: Apache-2.0
"""The autograd.Function of an operator, and the bar to second derivatives."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from rlk.errors import GradientError

if TYPE_CHECKING:
    from rlk.execution import Execution


_functorch = torch._C._functorch


class _FirstOrderOnly(torch.autograd.Function):
    """Passes gradients through; raises when somebody differentiates them."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: torch.Tensor) -> Any:
        ctx.name = name
        # Not views: autograd forbids to write into the views of a custom function.
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise GradientError(
            f"{ctx.name}: the derivative must be of first order, got a second differentiation; "
            "detach the first gradient"
        )


def require_reverse_mode(name: str, tensors: Sequence[Any]) -> None:
    """Refuse tangents of forward mode: an operator would drop them without a word."""
    if forward_ad._current_level < 0:
        return
    if any(isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None
           for t in tensors):  # fmt: skip
        raise GradientError(
            f"{name}: the derivative must be of reverse mode, got forward mode; "
            "use torch.autograd.grad"
        )


def require_single_gradients(name: str, gradients: Sequence[Any]) -> None:
    """Refuse a batch of output gradients, as of a vectorised Jacobian."""
    if torch.compiler.is_compiling():
        return  # compiled autograd takes no batches, and cannot trace the question
    functorch = torch._C._functorch
    for g in gradients:
        if g is not None and (
            functorch.is_batchedtensor(g) or functorch.is_legacy_batchedtensor(g)
        ):
            raise GradientError(
                f"{name}: the derivative must be of one output gradient at a time, got a batch of "
                "them; use is_grads_batched=False or vectorize=False"
            )


def require_autograd(name: str) -> None:
    """Refuse torch.func.grad and its relatives."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise GradientError(
            f"{name}: the derivative must be taken by torch.autograd, got torch.func; "
            "use torch.autograd.grad"
        )


def first_order_only(
    name: str, results: Sequence[torch.Tensor | None], sources: Sequence[Any]
) -> list[Any]:
    """Tie gradients to what they depend on, so that differentiating them raises.

    Without this, a backward that autograd cannot see would count as a constant and make second
    derivatives silently wrong. Raising at once would forbid `create_graph=True` to those who
    use the first order only.
    """
    depends = [t for t in sources if isinstance(t, torch.Tensor) and t.requires_grad]
    floating = [r for r in results if r is not None and r.is_floating_point()]
    if not depends or not floating or not torch.is_grad_enabled():
        return list(results)
    guarded = iter(_FirstOrderOnly.apply(name, len(floating), *floating, *depends))
    return [next(guarded) if r is not None and r.is_floating_point() else r for r in results]


def make_function(execution: "Execution") -> type[torch.autograd.Function]:
    """The autograd.Function that runs an operator.

    The first argument is the dispatch key set when the dispatcher called, or None on the
    eager path; the rest is the operator's schema.
    """
    operator = execution.operator
    inputs, outputs = len(operator.inputs), len(operator.outputs)
    # Of the arguments, behind the key set: the first input of a gradient, and those that share it.
    differentiable = [
        (1 + i, [1 + other for other in more]) for i, *more in operator.shared_gradients
    ]
    no_gradients = (None,) * (len(operator.scalars) + 1)

    class OperatorFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *arguments: Any) -> Any:
            results = execution.forward_pass(keyset, arguments)
            ctx.rest = arguments[inputs:]
            kept = operator.kept(arguments[:inputs], results[:outputs])
            ctx.save_for_backward(*kept, *results[outputs:])
            ctx.mark_non_differentiable(*results[outputs:])
            # Zeros for the saved state, on which nothing can depend, would take launches.
            ctx.set_materialize_grads(False)
            return results

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            gradients, saved = gradients[:outputs], ctx.saved_tensors
            require_single_gradients(operator.name, gradients)
            for gradient in gradients:
                if gradient is None:
                    gradients = execution.zeros_for_missing(gradients, saved[:inputs])
                    break
            tensors = (*gradients, *saved)
            wanted, (*scalars, backend) = ctx.needs_input_grad, ctx.rest
            needs = tuple([wanted[i] or any(wanted[j] for j in more) for i, more in differentiable])
            if not torch.is_grad_enabled():
                finished = execution.input_gradients(tensors, scalars, needs, backend)
                return None, *finished, *no_gradients
            with torch.no_grad():
                finished = execution.input_gradients(tensors, scalars, needs, backend)
            return None, *first_order_only(operator.name, finished, tensors), *no_gradients

    OperatorFunction.__name__ = OperatorFunction.__qualname__ = operator.name
    return OperatorFunction


def eager_apply(function: type[torch.autograd.Function]) -> Any:
    """What `apply` calls once it has looked for transforms of torch.func, at half its cost.

    For the eager path, which has looked before.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]
