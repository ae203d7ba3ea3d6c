# SPDX-License-Identifier: Apache-2.0
"""Running a declared operator: checks, rows, backend, and results in the caller's shape."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlk import dispatch
from rlk.arguments import (
    check_scalar,
    check_scalars,
    output_dtype,
    output_shape,
    plain_floats,
)
from rlk.autograd import eager_apply, make_function, require_reverse_mode
from rlk.launch import operator_call
from rlk.linear import make_linear_functions
from rlk.operator import Operator
from rlk.plans import Forms, Plans, plan_backward, plan_forward, plan_gradients
from rlk.reduce import exact_sum
from rlk.rows import empty_gradients, empty_outputs


class Execution:
    """Forward, backward and differentiable call of one operator on plain tensors."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator
        self._inputs = len(operator.inputs)
        self._outputs = len(operator.outputs)
        self._fixed = {s.name: s.default for s in operator.scalars if s.fixed}
        self._scalars = [(s.name, s, *plain_floats(s)) for s in operator.scalars]
        self._forwards = Plans(operator, plan_forward)
        self._backwards = Plans(operator, plan_backward)
        self._gradients = Plans(operator, plan_gradients)
        if operator.linear:
            self.function, self.transposed = make_linear_functions(self)
        else:
            self.function = make_function(self)
        self.apply_eagerly = eager_apply(self.function)

    def arguments(
        self, tensors: Sequence[Any], scalars: Mapping[str, Any], backend: str | None
    ) -> tuple[Any, ...]:
        """A call's arguments in the order of the schema, scalars checked."""
        if self._fixed:
            scalars = {**self._fixed, **scalars}
        requested = dispatch.requested_backend() if backend is None else backend
        dispatch.require_name(self.operator.name, requested)
        arguments = [*tensors]
        for name, declared, least, largest in self._scalars:
            value = scalars[name]
            if type(value) is not float or not least <= value <= largest:
                value = check_scalar(self.operator, declared, value)
            arguments.append(value)
        arguments.append(requested)
        return tuple(arguments)

    def call(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        """Outputs and saved state, differentiable where wanted; `arguments` as checked above."""
        tensors = arguments[: self._inputs]
        require_reverse_mode(self.operator.name, tensors)
        if torch.is_grad_enabled():
            for tensor in tensors:
                if tensor.requires_grad:
                    return self.apply_eagerly(None, *arguments)
        return self.run_forward(arguments)

    def apply(self, arguments: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """`call`, by whatever way the tensors ask for."""
        return self.call(*arguments)

    def forward(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        """Outputs and saved state, computed; `arguments` as the schema lists them."""
        tensors, scalars = arguments[: self._inputs], arguments[self._inputs : -1]
        return self.run_forward((*tensors, *self._checked(scalars), arguments[-1]))

    def run_forward(self, arguments: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """`forward` where the scalars are checked."""
        tensors = arguments[: self._inputs]
        return self._forwards.find(tensors, arguments[-1])(tensors, arguments[self._inputs : -1])

    def backward(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        """Gradients and exact states, computed; size 0 for those not needed."""
        tensors, scalars, needs = self.split_backward(arguments)
        results = self.run_backward(tensors, self._checked(scalars), needs, arguments[-1])
        nothing = empty_gradients(self.operator, tensors, (False,) * len(needs))
        return tuple(n if r is None else r for r, n in zip(results, nothing, strict=True))

    def run_backward(
        self,
        tensors: tuple[torch.Tensor, ...],
        scalars: Sequence[Any],
        needs: tuple[bool, ...],
        requested: str,
        initial: torch.Tensor | None = None,
        forms: Forms = (),
    ) -> tuple[Any, ...]:
        """Gradients and exact sums in their forms, None for those not needed; scalars checked.

        With `initial`, which is FP32, the chain over rows goes on from there and is not rounded.
        """
        chained = initial is not None
        if initial is not None:
            tensors = (*tensors, initial)
        return self._backwards.find(tensors, needs, requested, chained, forms)(tensors, scalars)

    def chained_backward(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        """`backward` whose chain over rows goes on from the tensor behind the saved state."""
        initial, rest = self.split_initial(arguments)
        tensors, scalars, needs = self.split_backward(rest)
        results = self.run_backward(tensors, self._checked(scalars), needs, rest[-1], initial)
        nothing = empty_gradients(self.operator, tensors, (False,) * len(needs))
        return tuple(n if r is None else r for r, n in zip(results, nothing, strict=True))

    def split_initial(self, arguments: tuple[Any, ...]) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """(where the chain goes on, all other arguments) of a chained backward call."""
        place = self._outputs + self._inputs + len(self.operator.saved)
        return arguments[place], (*arguments[:place], *arguments[place + 1 :])

    def split_backward(self, arguments: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        """(tensors, scalars, needs) of a backward call's arguments."""
        scalars = self._outputs + self._inputs + len(self.operator.saved)
        needs = scalars + len(self.operator.scalars)
        return arguments[:scalars], arguments[scalars:needs], arguments[needs:-1]

    def empty_outputs(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Uninitialised outputs and saved state of the right shapes, dtypes and strides."""
        return empty_outputs(self.operator, tensors)

    def input_gradients(
        self,
        tensors: tuple[torch.Tensor, ...],
        scalars: Sequence[Any],
        needs: tuple[bool, ...],
        requested: str,
    ) -> Sequence[torch.Tensor | None]:
        """One gradient per input: states rounded once to the dtype of their parameter."""
        return self._gradients.find(tensors, needs, requested)(tensors, scalars)

    def zeros_for_missing(
        self, gradients: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Output gradients, with zeros for outputs on which nothing depends."""
        operator = self.operator
        return tuple(
            inputs[0].new_zeros(
                output_shape(operator, declared, inputs),
                dtype=output_dtype(operator, declared, inputs),
            )
            if gradient is None
            else gradient
            for declared, gradient in zip(operator.outputs, gradients, strict=True)
        )

    def forward_pass(self, keyset: Any, arguments: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """The forward of `function`; `keyset` is None where no dispatcher is listening."""
        return self.run_forward(arguments)

    def backward_pass(
        self,
        tensors: tuple[torch.Tensor, ...],
        scalars: Sequence[Any],
        needs: tuple[bool, ...],
        requested: str,
    ) -> tuple[torch.Tensor | None, ...]:
        """The backward of `function`."""
        return self.run_backward(tensors, scalars, needs, requested)

    def transpose(
        self,
        tensors: Sequence[torch.Tensor],
        scalars: Sequence[Any],
        needs: Sequence[bool],
        requested: str,
    ) -> Sequence[torch.Tensor | None]:
        """The backward of a linear operator, differentiable."""
        return self.transposed.apply(None, *tensors, *scalars, *needs, requested)

    def transpose_pass(self, keyset: Any, arguments: Any) -> tuple[torch.Tensor | None, ...]:
        """The forward of `transposed`; `keyset` is None where no dispatcher is listening."""
        tensors, scalars, needs = self.split_backward(arguments)
        return self.run_backward(tensors, scalars, needs, arguments[-1])

    def round_state(self, state: torch.Tensor, dtype: torch.dtype, requested: str) -> torch.Tensor:
        """An exact state rounded once to the dtype of its parameter."""
        with operator_call(self.operator.name, "backward"):
            return exact_sum.round(state, dtype, backend=exact_sum.rounding_backend(requested))

    def _checked(self, scalars: Sequence[Any]) -> list[Any]:
        names = [s.name for s in self.operator.scalars]
        named = dict(zip(names, scalars, strict=True))
        return [*check_scalars(self.operator, named).values()]
