# SPDX-License-Identifier: Apache-2.0
"""Running a declared operator: checks, rows, backend, and results in the caller's shape."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlk import dispatch
from rlk.arguments import (
    check_gradients,
    check_scalars,
    check_tensors,
    output_dtype,
    output_shape,
)
from rlk.autograd import make_function, require_reverse_mode
from rlk.errors import BackendError
from rlk.launch import operator_call
from rlk.operator import Backend, Operator, Tensor
from rlk.plans import Plan, Plans, looks
from rlk.reduce import exact_sum
from rlk.rows import are_views, as_rows, from_rows, inputs_as_rows


class Execution:
    """Forward, backward and differentiable call of one operator on plain tensors."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator
        self._inputs = len(operator.inputs)
        self._outputs = len(operator.outputs)
        self._fixed = {s.name: s.default for s in operator.scalars if s.fixed}
        self._names = [s.name for s in operator.scalars]
        self._forward_plans, self._backward_plans = Plans(), Plans()
        self.function = make_function(self)

    def arguments(
        self, tensors: Sequence[Any], scalars: Mapping[str, Any], backend: str | None
    ) -> tuple[Any, ...]:
        """A call's arguments in the order of the schema, scalars checked."""
        checked = check_scalars(self.operator, {**self._fixed, **scalars})
        requested = dispatch.requested_backend() if backend is None else backend
        dispatch.require_name(self.operator.name, requested)
        return *tensors, *checked.values(), requested

    def call(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        """Outputs and saved state, differentiable where gradients are wanted; scalars checked."""
        require_reverse_mode(self.operator.name, arguments)
        if torch.is_grad_enabled():
            for tensor in arguments[: self._inputs]:
                if tensor.requires_grad:
                    return self.function.apply(None, *arguments)
        return self.run_forward(*arguments)

    def forward(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        """Outputs and saved state, computed; `arguments` as the schema lists them."""
        tensors, scalars = arguments[: self._inputs], arguments[self._inputs : -1]
        return self.run_forward(*tensors, *self._checked(scalars), arguments[-1])

    def run_forward(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        """`forward` where the scalars are checked."""
        tensors, requested = arguments[: self._inputs], arguments[-1]
        seen = looks(tensors, requested)
        plan = self._forward_plans.find(seen)
        if plan is None:
            plan = self._plan_forward(tensors, requested)
            self._forward_plans.keep(seen, plan)
        return plan(tensors, arguments[self._inputs : -1])

    def _plan_forward(self, tensors: Sequence[torch.Tensor], requested: str) -> Plan:
        operator = self.operator
        sizes = check_tensors(operator, tensors)
        choice = dispatch.choose(operator, tensors[0].device, requested)
        if sizes.get("T", 1) == 0 or tensors[0].numel() == 0:
            return lambda tensors, scalars: self.empty_outputs(tensors)
        declared = operator.outputs + operator.saved
        shapes = [output_shape(operator, t, tensors) for t in declared]
        rows = inputs_as_rows(operator, tensors)
        if are_views(rows, tensors) and hasattr(choice.module, "plan_forward"):
            return choice.module.plan_forward(rows, shapes, (operator.name, "forward"))

        def by_rows(tensors: Sequence[torch.Tensor], scalars: Sequence[Any]) -> tuple[Any, ...]:
            named = dict(zip(self._names, scalars, strict=True))
            with operator_call(operator.name, "forward"):
                results = choice.module.forward(*inputs_as_rows(operator, tensors), **named)
            _require_results(operator, choice.backend, "forward", results, len(declared))
            return tuple(map(from_rows, results, shapes))

        return by_rows

    def backward(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        """Row gradients and exact states, computed; size 0 for those not needed."""
        tensors, scalars, needs = self.split_backward(arguments)
        results = self.run_backward(tensors, self._checked(scalars), needs, arguments[-1])
        nothing = self.empty_gradients(self.split_tensors(tensors)[1], (False,) * len(needs))
        return tuple(n if r is None else r for r, n in zip(results, nothing, strict=True))

    def run_backward(
        self,
        tensors: Sequence[torch.Tensor],
        scalars: Sequence[Any],
        needs: Sequence[bool],
        requested: str,
    ) -> tuple[torch.Tensor | None, ...]:
        """Row gradients and exact states, None for those not needed; scalars checked."""
        seen = looks(tensors, needs, requested)
        plan = self._backward_plans.find(seen)
        if plan is None:
            plan = self._plan_backward(tensors, needs, requested)
            self._backward_plans.keep(seen, plan)
        return plan(tensors, scalars)

    def _plan_backward(
        self, tensors: Sequence[torch.Tensor], needs: Sequence[bool], requested: str
    ) -> Plan:
        operator = self.operator
        gradients, inputs = self.split_tensors(tensors)
        sizes = check_tensors(operator, inputs)
        check_gradients(operator, gradients, inputs)
        if sizes.get("T", 1) == 0 or inputs[0].numel() == 0 or not any(needs):
            return lambda tensors, _: self.empty_gradients(self.split_tensors(tensors)[1], needs)
        choice = dispatch.choose(operator, inputs[0].device, requested)
        named = [t.name for t in operator.differentiable]
        needed = frozenset(name for name, need in zip(named, needs, strict=True) if need)
        shapes = [
            _gradient_shape(t, tensor) if t.name in needed else None
            for t, tensor in zip(operator.inputs, inputs, strict=True)
            if t.gradient
        ]
        declared = operator.outputs + operator.inputs + operator.saved
        rows = [*map(as_rows, declared, tensors)]
        if are_views(rows, tensors) and hasattr(choice.module, "plan_backward"):
            return choice.module.plan_backward(rows, shapes, (operator.name, "backward"))

        def by_rows(tensors: Sequence[torch.Tensor], scalars: Sequence[Any]) -> tuple[Any, ...]:
            named = dict(zip(self._names, scalars, strict=True))
            with operator_call(operator.name, "backward"):
                rows = map(as_rows, declared, tensors)
                results = choice.module.backward(*rows, needs=needed, **named)
            _require_results(operator, choice.backend, "backward", results, len(needs))
            self._require_needed(choice.backend, needed, results)
            return tuple(
                None if shape is None else from_rows(result, shape)
                for result, shape in zip(results, shapes, strict=True)
            )

        return by_rows

    def split_backward(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """(tensors, scalars, needs) of a backward call's arguments."""
        scalars = self._outputs + self._inputs + len(self.operator.saved)
        needs = scalars + len(self._names)
        return arguments[:scalars], arguments[scalars:needs], arguments[needs:-1]

    def split_tensors(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        """(output gradients, inputs) among a backward call's tensors."""
        return tensors[: self._outputs], tensors[self._outputs : self._outputs + self._inputs]

    def empty_outputs(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Uninitialised outputs and saved state of the right shapes, dtypes and strides."""
        return tuple(
            tensors[0].new_empty(
                output_shape(self.operator, t, tensors),
                dtype=output_dtype(self.operator, t, tensors),
            )
            for t in self.operator.outputs + self.operator.saved
        )

    def empty_gradients(
        self, inputs: Sequence[torch.Tensor], needs: Sequence[bool]
    ) -> tuple[torch.Tensor, ...]:
        """Uninitialised row gradients and zero states; size 0 for those not needed."""
        declared = zip(self.operator.inputs, inputs, strict=True)
        differentiable = [(t, tensor) for t, tensor in declared if t.gradient]
        return tuple(
            _empty_gradient(t, tensor, needed)
            for (t, tensor), needed in zip(differentiable, needs, strict=True)
        )

    def input_gradients(
        self,
        tensors: Sequence[torch.Tensor],
        scalars: Sequence[Any],
        needs: Sequence[bool],
        requested: str,
    ) -> list[torch.Tensor | None]:
        """One gradient per input: states rounded once to the dtype of their parameter."""
        results = iter(self.backward_pass(tensors, scalars, needs, requested))
        needed = iter(needs)
        _, inputs = self.split_tensors(tensors)
        finished: list[torch.Tensor | None] = []
        for declared, tensor in zip(self.operator.inputs, inputs, strict=True):
            result = next(results) if declared.gradient else None
            if not declared.gradient or not next(needed) or result is None:
                finished.append(None)
            elif declared.gradient == "row":
                finished.append(result)
            elif inputs[0].numel() == 0:
                # A sum over no rows is known without a launch.
                zeros = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
                finished.append(zeros)
            else:
                finished.append(self.round_state(result, tensor.dtype, requested))
        return finished

    def zeros_for_missing(
        self, gradients: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Output gradients, zeros in the place of those that nothing depends on."""
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

    def forward_pass(self, keyset: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
        """The forward of `function`; `keyset` is None where no dispatcher is listening."""
        return self.run_forward(*arguments)

    def backward_pass(self, *arguments: Any) -> tuple[torch.Tensor | None, ...]:
        """The backward of `function`."""
        return self.run_backward(*arguments)

    def round_state(self, state: torch.Tensor, dtype: torch.dtype, requested: str) -> torch.Tensor:
        """An exact state rounded once to the dtype of its parameter."""
        with operator_call(self.operator.name, "backward"):
            return exact_sum.round(state, dtype, backend=rounding_backend(requested))

    def _checked(self, scalars: Sequence[Any]) -> Sequence[Any]:
        named = dict(zip(self._names, scalars, strict=True))
        return [*check_scalars(self.operator, named).values()]

    def _require_needed(
        self, backend: Backend, needed: frozenset[str], results: Sequence[Any]
    ) -> None:
        for declared, result in zip(self.operator.differentiable, results, strict=True):
            if declared.name in needed and result is None:
                raise BackendError(
                    f'{self.operator.name}: backend "{backend.name}" must return the gradient of '
                    f"{declared.name}, got None"
                )


def _gradient_shape(declared: Tensor, tensor: torch.Tensor) -> tuple[int, ...]:
    state = (exact_sum.STATE_ROWS,) if declared.gradient == "parameter" else ()
    return (*state, *tensor.shape)


def _empty_gradient(declared: Tensor, tensor: torch.Tensor, needed: bool) -> torch.Tensor:
    shape = _gradient_shape(declared, tensor) if needed else (0,)
    if declared.gradient == "parameter":
        return tensor.new_zeros(shape, dtype=torch.int64)
    return tensor.new_empty(shape)


def _require_results(
    operator: Operator, backend: Backend, direction: str, results: Any, count: int
) -> None:
    if not isinstance(results, tuple) or len(results) != count:
        got = len(results) if isinstance(results, tuple) else type(results).__name__
        raise BackendError(
            f'{operator.name}: backend "{backend.name}" must return a tuple of {count} from '
            f"{direction}, got {got}"
        )


def rounding_backend(requested: str) -> str | None:
    """The backend that rounds an exact state for a call on backend `requested`."""
    return requested if requested in exact_sum.BACKENDS else None
