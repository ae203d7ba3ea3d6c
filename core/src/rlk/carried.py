# SPDX-License-Identifier: Apache-2.0
"""A second operator of torch for each one with exact parameter gradients: it does not round them.

A *carrier* is a leaf of zeros, FP64 [13, ...], that goes into a call beside its parameter and is
read by nothing. Its gradient is the exact state of the parameter's sum. Digits are whole numbers
below 2^32, so autograd adds 2^20 of them without rounding, in whatever order it runs: calls of one
graph, micro-batches, recomputed and compiled ones need no rule of their own. The parameter itself
gets a gradient of zeros: whoever waits for one, as DDP does, sees it.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlk.arguments import dtype_name
from rlk.autograd import (
    eager_apply,
    first_order_only,
    require_reverse_mode,
    require_single_gradients,
)
from rlk.errors import ArgumentError
from rlk.operator import Operator
from rlk.reduce.exact_sum import STATE_ROWS

if TYPE_CHECKING:
    from rlk.publish import Published

# None: this parameter's sum is rounded in the call, as without a carrier.
Carriers = Sequence[torch.Tensor | None]


def carried_name(operator: Operator) -> str:
    """The name by which torch knows the second operator."""
    return f"{operator.name}_carried"


class Carried:
    """The call of a published operator with carriers."""

    def __init__(self, published: "Published") -> None:
        self.published = published
        self._operator = published.operator
        self.inputs = len(self._operator.inputs)
        self.count = len(self._operator.exact_parameters)
        self._places = [i for i, t in enumerate(self._operator.inputs) if t.gradient == "parameter"]
        self.function = _make_function(self)
        self._apply_eagerly = eager_apply(self.function)

    def arguments(self, arguments: Sequence[Any], carriers: Carriers) -> tuple[Any, ...]:
        """Those of the second operator, carriers checked."""
        tensors = arguments[: self.inputs]
        self._check(tensors, carriers)
        return *tensors, *carriers, *arguments[self.inputs :]

    def call(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        """Outputs and saved state of a call on plain tensors, differentiable where wanted."""
        tensors = arguments[: self.inputs + self.count]
        require_reverse_mode(self._operator.name, tensors)
        if wants_gradient(tensors):
            return self._apply_eagerly(None, *arguments)
        return self.published.run_forward(self.without_carriers(arguments))

    def without_carriers(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments of the operator itself."""
        return *arguments[: self.inputs], *arguments[self.inputs + self.count :]

    def input_gradients(
        self, tensors: tuple[Any, ...], scalars: Sequence[Any], wanted: Sequence[bool], backend: str
    ) -> list[torch.Tensor | None]:
        """One gradient for each input, then one for each carrier; `wanted` in the same order."""
        operator, published = self._operator, self.published
        # A parameter's sum is needed if its carrier wants it; without one it is rounded at once.
        carried = dict(zip(self._places, wanted[self.inputs :], strict=True))
        groups = operator.shared_gradients
        needs = tuple([any(wanted[i] or carried.get(i, False) for i in group) for group in groups])
        results = published.backward_pass(tensors, scalars, needs, backend)
        parameters = tensors[len(operator.outputs) :]
        finished: list[torch.Tensor | None] = [None] * len(wanted)
        for (place, *others), result, needed in zip(groups, results, needs, strict=True):
            if not needed or result is None:
                continue
            if carried.get(place, False):
                finished[self.inputs + self._places.index(place)] = result.double()
                if wanted[place]:
                    finished[place] = torch.zeros_like(parameters[place])
            elif place in carried:
                dtype = parameters[place].dtype
                finished[place] = published.round_state(result, dtype, backend)
            else:
                for shared in (place, *others):
                    finished[shared] = result
        return finished

    def _check(self, tensors: Sequence[torch.Tensor], carriers: Carriers) -> None:
        for place, carrier in zip(self._places, carriers, strict=True):
            name, parameter = self._operator.inputs[place].name, tensors[place]
            wrong = None if carrier is None else _difference(name, parameter, carrier)
            if wrong is not None:
                requirement, actual = wrong
                raise ArgumentError(
                    f"{self._operator.name}: {name}_sum must be {requirement}, got {actual}"
                )


def _difference(name: str, parameter: torch.Tensor, carrier: Any) -> tuple[object, object] | None:
    """(what the carrier of a parameter must be, what it is) where that is something else."""
    if not isinstance(carrier, torch.Tensor):
        return "a tensor or None", type(carrier).__name__
    if carrier.dtype != torch.float64:
        return "float64", dtype_name(carrier.dtype)
    shape = [STATE_ROWS, *parameter.shape]
    if list(carrier.shape) != shape:
        return shape, list(carrier.shape)
    if carrier.device != parameter.device:
        return f"on {parameter.device} like {name}", carrier.device
    if not torch.compiler.is_compiling() and is_dtensor(parameter):
        return f"None where {name} is a DTensor, whose ranks add exact states", "a tensor"
    return None


def wants_gradient(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether autograd must record a call on these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def is_dtensor(tensor: Any) -> bool:
    """Whether it is a DTensor, without an import of what nobody has imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def schema(operator: Operator, plain: str) -> str:
    """The schema of the second operator, from that of the first."""
    inputs = ", ".join(f"Tensor {t.name}" for t in operator.inputs)
    carriers = "".join(f", Tensor? {t.name}_sum" for t in operator.exact_parameters)
    _, _, rest = plain.partition("(" + inputs)
    return f"{carried_name(operator)}({inputs}{carriers}{rest}"


def _make_function(carried: Carried) -> type[torch.autograd.Function]:
    """The autograd.Function; its first argument is as that of an operator's own."""
    published, operator = carried.published, carried.published.operator
    outputs, inputs, count = len(operator.outputs), carried.inputs, carried.count
    no_gradients = (None,) * (len(operator.scalars) + 1)

    class CarriedFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *arguments: Any) -> Any:
            plain = carried.without_carriers(arguments)
            results = published.forward_pass(keyset, plain)
            ctx.rest = plain[inputs:]
            kept = operator.kept(plain[:inputs], results[:outputs])
            ctx.save_for_backward(*kept, *results[outputs:])
            ctx.mark_non_differentiable(*results[outputs:])
            ctx.set_materialize_grads(False)
            return results

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            given, saved = gradients[:outputs], ctx.saved_tensors
            require_single_gradients(operator.name, given)
            if any(g is None for g in given):
                given = published.zeros_for_missing(given, saved[:inputs])
            tensors = (*given, *saved)
            *scalars, backend = ctx.rest
            wanted = ctx.needs_input_grad[1 : 1 + inputs + count]
            with torch.no_grad():
                finished = carried.input_gradients(tensors, scalars, wanted, backend)
            return None, *first_order_only(operator.name, finished, tensors), *no_gradients

    CarriedFunction.__name__ = CarriedFunction.__qualname__ = carried_name(operator)
    return CarriedFunction
