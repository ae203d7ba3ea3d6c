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
from rlk.reduce import exact_sum
from rlk.rows import as_rows, from_rows, inputs_as_rows


class Execution:
    """Forward, backward and differentiable call of one operator on plain tensors."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator
        self._inputs = len(operator.inputs)
        self._outputs = len(operator.outputs)
        self._fixed = {s.name: s.default for s in operator.scalars if s.fixed}
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
        """Outputs and saved state, differentiable where gradients are wanted."""
        require_reverse_mode(self.operator.name, arguments)
        if torch.is_grad_enabled() and any(
            isinstance(t, torch.Tensor) and t.requires_grad for t in arguments[: self._inputs]
        ):
            return self.function.apply(None, *arguments)
        return self.forward(*arguments)

    def forward(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        """Outputs and saved state, computed; `arguments` as the schema lists them."""
        operator = self.operator
        tensors = arguments[: self._inputs]
        sizes = check_tensors(operator, tensors)
        scalars = self._scalars(arguments[self._inputs : -1])
        choice = dispatch.choose(operator, tensors[0].device, arguments[-1])
        if sizes.get("T", 1) == 0 or tensors[0].numel() == 0:
            return self.empty_outputs(tensors)
        with operator_call(operator.name, "forward"):
            results = choice.module.forward(*inputs_as_rows(operator, tensors), **scalars)
        declared = operator.outputs + operator.saved
        _require_results(operator, choice.backend, "forward", results, len(declared))
        return tuple(
            from_rows(result, output_shape(operator, t, tensors))
            for t, result in zip(declared, results, strict=True)
        )

    def backward(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        """Row gradients and exact states, computed; size 0 for those not needed."""
        operator = self.operator
        gradients, tensors, saved, scalars, needs = self.split_backward(arguments)
        sizes = check_tensors(operator, tensors)
        check_gradients(operator, gradients, tensors)
        if sizes.get("T", 1) == 0 or tensors[0].numel() == 0 or not any(needs.values()):
            return self.empty_gradients(tensors, needs)
        choice = dispatch.choose(operator, tensors[0].device, arguments[-1])
        with operator_call(operator.name, "backward"):
            results = choice.module.backward(
                *(as_rows(t, g) for t, g in zip(operator.outputs, gradients, strict=True)),
                *inputs_as_rows(operator, tensors),
                *(as_rows(t, s) for t, s in zip(operator.saved, saved, strict=True)),
                needs=frozenset(name for name, needed in needs.items() if needed),
                **scalars,
            )
        _require_results(operator, choice.backend, "backward", results, len(needs))
        finished = iter(results)
        return tuple(
            self._gradient(t, tensor, needs[t.name], next(finished), choice.backend)
            for t, tensor in zip(operator.inputs, tensors, strict=True)
            if t.gradient
        )

    def split_backward(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """(output gradients, inputs, saved, scalars, needs) of a backward call's arguments."""
        cuts = (self._outputs, self._inputs, len(self.operator.saved), len(self.operator.scalars))
        parts, start = [], 0
        for length in cuts:
            parts.append(arguments[start : start + length])
            start += length
        names = [t.name for t in self.operator.differentiable]
        needs = dict(zip(names, arguments[start:-1], strict=True))
        return parts[0], parts[1], parts[2], self._scalars(parts[3]), needs

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
        self, tensors: Sequence[torch.Tensor], needs: Mapping[str, bool]
    ) -> tuple[torch.Tensor, ...]:
        """Uninitialised row gradients and zero states; size 0 for those not needed."""
        return tuple(
            _empty_gradient(declared, tensor, needs[declared.name])
            for declared, tensor in zip(self.operator.inputs, tensors, strict=True)
            if declared.gradient
        )

    def finish_gradients(
        self,
        results: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        needs: Mapping[str, bool],
        requested: str,
    ) -> list[torch.Tensor | None]:
        """One gradient per input: states rounded once to the dtype of their parameter."""
        finished: list[torch.Tensor | None] = []
        remaining = iter(results)
        for declared, tensor in zip(self.operator.inputs, tensors, strict=True):
            result = next(remaining) if declared.gradient else None
            if result is None or not needs[declared.name]:
                finished.append(None)
            elif declared.gradient == "parameter":
                # A sum over no rows is known without a launch.
                empty = tensors[0].numel() == 0
                finished.append(
                    torch.zeros_like(tensor, memory_format=torch.contiguous_format)
                    if empty
                    else self.round_state(result, tensor.dtype, requested)
                )
            else:
                finished.append(result)
        return finished

    def _gradient(
        self,
        declared: Tensor,
        tensor: torch.Tensor,
        needed: bool,
        result: torch.Tensor | None,
        backend: Backend,
    ) -> torch.Tensor:
        if not needed:
            return _empty_gradient(declared, tensor, needed)
        if result is None:
            raise BackendError(
                f'{self.operator.name}: backend "{backend.name}" must return the gradient of '
                f"{declared.name}, got None"
            )
        return from_rows(result, _gradient_shape(declared, tensor))

    def _scalars(self, values: Sequence[Any]) -> dict[str, Any]:
        names = [s.name for s in self.operator.scalars]
        return check_scalars(self.operator, dict(zip(names, values, strict=True)))

    def backward_pass(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        """The backward of `function`."""
        return self.backward(*arguments)

    def forward_pass(self, keyset: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
        """The forward of `function`; `keyset` is None where no dispatcher is listening."""
        return self.forward(*arguments)

    def round_state(self, state: torch.Tensor, dtype: torch.dtype, requested: str) -> torch.Tensor:
        """An exact state rounded once to the dtype of its parameter."""
        with operator_call(self.operator.name, "backward"):
            return exact_sum.round(state, dtype, backend=rounding_backend(requested))


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
