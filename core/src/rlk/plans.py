# SPDX-License-Identifier: Apache-2.0
"""What the looks of a call decide, found out once: checks, backend, shapes, strides.

No check reads an element of a tensor, so calls that look alike pass or fail alike. The first one
is checked in full and leaves a plan, a function of the tensors and scalars; later ones run it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlk import dispatch
from rlk.arguments import check_gradients, check_saved, check_tensors, output_shape
from rlk.errors import BackendError
from rlk.launch import operator_call
from rlk.operator import Backend, Operator
from rlk.reduce import exact_sum
from rlk.reduce.exact_sum.form import SumForm
from rlk.rows import are_views, as_rows, empty_gradients, empty_outputs, from_rows, gradient_shape

# (tensors, checked scalars in the order of the declaration) -> results.
Plan = Callable[[Sequence[torch.Tensor], Sequence[Any]], tuple[Any, ...]]

# Of all gradients, STATE for those that are no exact sums; or empty, if all sums are to be states.
Forms = tuple[SumForm, ...]

# 1024 plans of about 2 KB: every shape of a training run, but not of a server's whole life.
MOST_PLANS = 1024


class Plans:
    """The plans of one operator in one direction, made by `make(operator, tensors, *request)`."""

    def __init__(self, operator: Operator, make: Callable[..., Plan]) -> None:
        self._operator = operator
        self._make = make
        self._plans: dict[Any, Plan] = {}

    def find(self, tensors: Sequence[torch.Tensor], *request: Any) -> Plan:
        """The plan of a call, made and kept if none that looks alike came before.

        Raises:
            ArgumentError, BackendError, PlatformError: the call cannot be served; nothing is kept.
        """
        seen = looks(tensors, request)
        plan = self._plans.get(seen)
        if plan is None:
            plan = self._make(self._operator, tensors, *request)
            if len(self._plans) >= MOST_PLANS:
                # All of them: most are of sizes that never return.
                self._plans.clear()
            if seen is not None:
                self._plans[seen] = plan
        return plan


def looks(tensors: Sequence[torch.Tensor], request: Any) -> Any:
    """All that a check or a plan may know of a call; None if a tensor has no strides."""
    seen: list[Any] = [dispatch.generation, request]
    try:
        for t in tensors:
            seen += (t.shape, t.stride(), t.dtype, t.device, t.layout, t.is_neg(), t.requires_grad)
    except RuntimeError:
        # Compressed and nested layouts, which the checks refuse by name.
        return None
    return tuple(seen)


def plan_forward(operator: Operator, tensors: Sequence[torch.Tensor], requested: str) -> Plan:
    """From the inputs to outputs and saved state in the caller's shape."""
    sizes = check_tensors(operator, tensors)
    choice = dispatch.choose(operator, tensors[0].device, requested)
    if sizes.get("T", 1) == 0 or tensors[0].numel() == 0:
        return lambda tensors, scalars: empty_outputs(operator, tensors)
    results = operator.outputs + operator.saved
    shapes = [output_shape(operator, declared, tensors) for declared in results]
    rows = as_rows(operator, operator.inputs, tensors)
    if hasattr(choice.module, "plan_forward") and are_views(rows, tensors):
        return choice.module.plan_forward(rows, shapes, (operator.name, "forward"))
    run = _by_rows(operator, choice, "forward", len(results))

    def plan(tensors: Sequence[torch.Tensor], scalars: Sequence[Any]) -> tuple[Any, ...]:
        results = run(as_rows(operator, operator.inputs, tensors), scalars)
        return tuple(map(from_rows, results, shapes))

    return plan


def plan_backward(
    operator: Operator,
    tensors: Sequence[torch.Tensor],
    needs: tuple[bool, ...],
    requested: str,
    chained: bool = False,
    forms: Forms = (),
) -> Plan:
    """From output gradients, inputs and saved state to gradients, and exact sums in their forms.

    None comes back for those not needed. Of a `chained` call the last tensor is where the chain
    over rows goes on. `forms` are of all gradients; without any, sums are states.
    """
    if chained:
        tensors = tensors[:-1]
    gradients, inputs = operator.split_backward(tensors)
    sizes = check_tensors(operator, inputs)
    check_gradients(operator, gradients, inputs)
    check_saved(operator, tensors[len(gradients) + len(inputs) :], inputs)
    if sizes.get("T", 1) == 0 or inputs[0].numel() == 0 or not any(needs):

        def nothing(tensors: Sequence[torch.Tensor], scalars: Sequence[Any]) -> tuple[Any, ...]:
            return empty_gradients(operator, tensors, needs, chained)

        return _finishing(nothing, operator, inputs, needs, requested, forms)
    choice = dispatch.choose(operator, inputs[0].device, requested)
    read = operator.outputs + operator.inputs + operator.saved
    differentiable = [(operator.inputs[i], inputs[i]) for i, *_ in operator.shared_gradients]
    shapes = [
        gradient_shape(*which) if needed else None
        for which, needed in zip(differentiable, needs, strict=True)
    ]
    rows = as_rows(operator, read, tensors)
    names = [declared.name for declared, _ in differentiable]
    finishes = any(forms) and getattr(choice.module, "finishes_sums", False)
    planned = hasattr(choice.module, "plan_backward") and not chained
    if planned and are_views(rows, tensors):
        more = {"forms": forms} if finishes else {}
        plan = choice.module.plan_backward(rows, shapes, (operator.name, "backward"), **more)
    else:
        ends = dict(zip(names, forms, strict=True)) if finishes else {}
        if finishes:
            shapes = [
                None if shape is None else _ended(shape, parameter.shape, form)
                for (_, parameter), shape, form in zip(differentiable, shapes, forms, strict=True)
            ]
        plan = _plan_backward_by_rows(operator, choice, names, shapes, needs, chained, ends)
    if finishes:
        return plan
    return _finishing(plan, operator, inputs, needs, requested, forms)


def _ended(state: Any, sums: Any, form: SumForm) -> Any:
    """What an exact sum has in its form, of what it has as a state and as sums."""
    return (state, sums, (state, sums))[form]


def _plan_backward_by_rows(
    operator: Operator,
    choice: dispatch.Choice,
    names: Sequence[str],
    shapes: Sequence[Any],
    needs: tuple[bool, ...],
    chained: bool,
    forms: dict[str, SumForm],
) -> Plan:
    """By the backend's `backward`; `forms` if it finishes sums, whose shapes may then be two."""
    read = operator.outputs + operator.inputs + operator.saved
    needed = frozenset(name for name, need in zip(names, needs, strict=True) if need)
    options = {"forms": forms} if forms else {}
    run = _by_rows(operator, choice, "backward", len(needs), needs=needed, **options)

    def plan(tensors: Sequence[torch.Tensor], scalars: Sequence[Any]) -> tuple[Any, ...]:
        more = {"initial": tensors[-1].detach()} if chained else {}
        rows = as_rows(operator, read, tensors[:-1] if chained else tensors)
        results = run(rows, scalars, **more)
        for name, result in zip(names, results, strict=True):
            if result is None and name in needed:
                raise _wrong(operator, choice.backend, f"the gradient of {name}", "None")
        return tuple(
            None
            if shape is None
            else tuple(map(from_rows, result, shape))
            if isinstance(result, tuple)
            else from_rows(result, shape)
            for result, shape in zip(results, shapes, strict=True)
        )

    return plan


def rounded_forms(operator: Operator) -> Forms:
    """Those of a backward whose exact sums are all rounded."""
    return tuple(
        SumForm.ROUNDED if t.gradient == "parameter" else SumForm.STATE
        for t in operator.returned_gradients
    )


def plan_gradients(
    operator: Operator, tensors: Sequence[torch.Tensor], needs: tuple[bool, ...], requested: str
) -> Plan:
    """From output gradients, inputs and saved state to one gradient per input, sums rounded."""
    backward = plan_backward(operator, tensors, needs, requested, False, rounded_forms(operator))
    steps = [
        (place, places)
        for place, (places, needed) in enumerate(zip(operator.shared_gradients, needs, strict=True))
        if needed
    ]

    def plan(tensors: Sequence[torch.Tensor], scalars: Sequence[Any]) -> tuple[Any, ...]:
        results = backward(tensors, scalars)
        finished: list[torch.Tensor | None] = [None] * len(operator.inputs)
        for place, places in steps:
            for each in places:
                finished[each] = results[place]
        return tuple(finished)

    return plan


def _finishing(
    plan: Plan,
    operator: Operator,
    inputs: Sequence[torch.Tensor],
    needs: Sequence[bool],
    requested: str,
    forms: Forms,
) -> Plan:
    """A plan of states, and steps that give them their forms."""
    backend, call = exact_sum.rounding_backend(requested), (operator.name, "backward")
    steps = []
    for place, form in enumerate(forms):
        if needs[place] and form != SumForm.STATE:
            parameter = inputs[operator.shared_gradients[place][0]]
            # What a sum over no rows comes to is known without a launch of ours.
            known = inputs[0].numel() == 0
            steps.append((place, exact_sum.plan_finish(parameter, backend, call, form, known)))
    if not steps:
        return plan

    def finished(tensors: Sequence[torch.Tensor], scalars: Sequence[Any]) -> tuple[Any, ...]:
        results = [*plan(tensors, scalars)]
        for place, finish in steps:
            results[place] = finish(results[place])
        return tuple(results)

    return finished


def _by_rows(
    operator: Operator, choice: dispatch.Choice, direction: str, count: int, **options: Any
) -> Callable[..., tuple[Any, ...]]:
    """A backend's function as it is declared: rows and named scalars to `count` results."""
    names = [s.name for s in operator.scalars]
    function = getattr(choice.module, direction)

    def run(rows: Any, scalars: Sequence[Any], **more: Any) -> tuple[Any, ...]:
        with operator_call(operator.name, direction):
            results = function(*rows, **options, **more, **dict(zip(names, scalars, strict=True)))
        if not isinstance(results, tuple) or len(results) != count:
            got = len(results) if isinstance(results, tuple) else type(results).__name__
            raise _wrong(operator, choice.backend, f"a tuple of {count} from {direction}", got)
        return results

    return run


def _wrong(operator: Operator, backend: Backend, wanted: str, got: object) -> BackendError:
    return BackendError(
        f'{operator.name}: backend "{backend.name}" must return {wanted}, got {got}'
    )
