# SPDX-License-Identifier: Apache-2.0
"""A second operator of torch for each one with parameters: it does not finish their gradients.

A *carrier* is a leaf that goes into a call beside its parameter. Of an exact sum it is zeros, FP64
[13, ...], read by nothing, and its gradient is the exact state. Digits are whole numbers below
2^32, so autograd adds 2^20 of them without rounding, in whatever order it runs: calls of one
graph, micro-batches, recomputed and compiled ones need no rule of their own.

The carrier of a chain over rows is the chain so far, FP32 and shaped as the parameter. Backward
reads it, and its gradient is the chain with the rows of this call: not to be added to the carrier,
but to be put in its place before the next backward. Beside it goes a leaf of FP64 [3] whose
gradient says of the call: its rows, 1, and the rows behind its last whole step.

The parameter itself gets a gradient of zeros: whoever waits for one, as DDP does, sees it.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlk.arguments import dtype_name
from rlk.autograd import (
    eager_apply,
    first_order_only,
    require_reverse_mode,
    require_single_gradients,
)
from rlk.errors import ArgumentError, GradientError, RlkError
from rlk.operator import Operator
from rlk.reduce.exact_sum import STATE_ROWS
from rlk.reduce.exact_sum.form import SumForm
from rlk.reduce.mma_chain.golden import FP32_BLOCK, STEP

if TYPE_CHECKING:
    from rlk.publish import Published

# None: this parameter's gradient is finished in the call, as without a carrier.
Carriers = Sequence[torch.Tensor | None]
# Rows, calls, and rows behind a whole step.
CALLS = 3


def chain_step(dtype: torch.dtype) -> int:
    """How many rows of this dtype a step of a chain takes: it may be cut between steps."""
    return FP32_BLOCK if dtype == torch.float32 else STEP


def carried_name(operator: Operator) -> str:
    """The name by which torch knows the second operator."""
    return f"{operator.name}_carried"


class Carried:
    """The call of a published operator with carriers."""

    def __init__(self, published: "Published") -> None:
        self.published = published
        self._operator = published.operator
        self.inputs = len(self._operator.inputs)
        self.count = len(self._operator.carriers)
        self._places = [i for i, t in enumerate(self._operator.inputs) if t.gradient == "parameter"]
        chains = [i for i, t in enumerate(self._operator.inputs) if t.gradient == "chain"]
        if len(chains) > 1:
            raise RlkError(f"{self._operator.name}: chains must be at most one, got {len(chains)}")
        self._chain_place = chains[0] if chains else None
        # Of each carrier, the parameter.
        more = self.count - len(self._places)
        self._carried_places = [*self._places, *[self._chain_place or 0] * more]
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

    def chain(self, arguments: Sequence[Any]) -> torch.Tensor | None:
        """The carrier of the chain among a call's arguments."""
        return None if self._chain_place is None else arguments[self.inputs + len(self._places)]

    def input_gradients(
        self,
        tensors: tuple[Any, ...],
        scalars: Sequence[Any],
        wanted: Sequence[bool],
        backend: str,
        chain: torch.Tensor | None,
    ) -> list[torch.Tensor | None]:
        """One gradient for each input, then one for each carrier; `wanted` in the same order."""
        operator, published = self._operator, self.published
        # A parameter's sum is needed if its carrier wants it; without one it is rounded at once.
        sums = wanted[self.inputs : self.inputs + len(self._places)]
        carried = dict(zip(self._places, sums, strict=True))
        if chain is not None and self._chain_place is not None and wanted[-2]:
            carried[self._chain_place] = True
        else:
            chain = None
        groups = operator.shared_gradients
        needs = tuple([any(wanted[i] or carried.get(i, False) for i in group) for group in groups])
        forms = tuple([self._form(place, carried) for place, *_ in groups])
        results = published.backward_pass(tensors, scalars, needs, backend, chain, forms)
        parameters = tensors[len(operator.outputs) :]
        finished: list[torch.Tensor | None] = [None] * len(wanted)
        for (place, *others), result, needed in zip(groups, results, needs, strict=True):
            if not needed or result is None:
                continue
            if carried.get(place, False) and place == self._chain_place:
                finished[-2:] = result, self._calls(parameters)
                if wanted[place]:
                    finished[place] = torch.zeros_like(parameters[place])
            elif carried.get(place, False):
                state, zeros = result
                finished[self.inputs + self._places.index(place)] = state
                if wanted[place]:
                    finished[place] = zeros
            else:
                for shared in (place, *others):
                    finished[shared] = result
        return finished

    def _form(self, place: int, carried: Mapping[int, bool]) -> SumForm:
        """That of the gradient of an input; no other end than a state has what is no exact sum."""
        if place not in self._places:
            return SumForm.STATE
        return SumForm.CARRIED if carried[place] else SumForm.ROUNDED

    def require_carriers(self, ctx: Any, wanted: Sequence[bool]) -> None:
        """Refuse a backward that asks for a parameter's gradient, which is zeros, alone.

        So do `torch.autograd.grad` of parameters and `backward(inputs=parameters)`: what they leave
        out, autograd computes and drops.
        """
        if torch.compiler.is_compiling():
            return  # a graph has been asked for all of them, and cannot trace the question
        # One edge for each tensor among the arguments.
        edges = iter(ctx.next_functions)
        nodes = [next(edges)[0] if given else None for given in ctx.given]
        for carrier, place in enumerate(self._carried_places, self.inputs):
            if wanted[place] and wanted[carrier] and _is_run(nodes[place]):
                if not _is_run(nodes[carrier]):
                    name = self._operator.inputs[place].name
                    raise GradientError(
                        f"{self._operator.name}: backward must run for all leaves where {name} has "
                        f"a carrier, got one for {name} alone, whose gradient is zeros; call "
                        "backward() without inputs="
                    )

    def _calls(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the second carrier of a chain takes of a call."""
        which = next(i for i, t in enumerate(self._operator.inputs) if t.has_rows)
        tensor, declared = inputs[which], self._operator.inputs[which]
        # Not Size.numel: it would fix the row count of a dynamic graph.
        rows = math.prod(tensor.shape[: tensor.dim() - len(declared.shape) + 1])
        numbers = rows, 1, rows % chain_step(tensor.dtype)
        # Not torch.tensor: its copy from the host is none that a CUDA graph can capture.
        filled = [tensor.new_full((), n, dtype=torch.float64) for n in numbers]
        return torch.stack(filled)

    def _check(self, tensors: Sequence[torch.Tensor], carriers: Carriers) -> None:
        names = self._operator.carriers
        given = [c is not None for c in carriers[len(self._places) :]]
        for carrier_name, place, carrier in zip(names, self._carried_places, carriers, strict=True):
            name, parameter = self._operator.inputs[place].name, tensors[place]
            wrong = None
            if carrier is not None:
                kind = carrier_name.removeprefix(f"{name}_")
                wrong = _difference(name, kind, parameter, carrier)
            elif place == self._chain_place and any(given):
                wrong = f"a tensor beside the other carrier of {name}", None
            if wrong is not None:
                requirement, actual = wrong
                raise ArgumentError(
                    f"{self._operator.name}: {carrier_name} must be {requirement}, got {actual}"
                )


def _difference(
    name: str, kind: str, parameter: torch.Tensor, carrier: Any
) -> tuple[object, object] | None:
    """(what the carrier of a parameter must be, what it is) where that is something else."""
    if not isinstance(carrier, torch.Tensor):
        return "a tensor or None", type(carrier).__name__
    dtype = torch.float32 if kind == "chain" else torch.float64
    if carrier.dtype != dtype:
        return dtype_name(dtype), dtype_name(carrier.dtype)
    shapes = {"sum": [STATE_ROWS, *parameter.shape], "chain": [*parameter.shape], "calls": [CALLS]}
    shape = shapes[kind]
    if list(carrier.shape) != shape:
        return shape, list(carrier.shape)
    if carrier.device != parameter.device:
        return f"on {parameter.device} like {name}", carrier.device
    if not torch.compiler.is_compiling() and is_dtensor(parameter):
        return f"None where {name} is a DTensor, whose ranks add exact states", "a tensor"
    return None


def _is_run(node: Any) -> bool:
    """Whether the backward that is running has this node to run, or its gradient to return."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient `torch.autograd.grad` returns
        return True


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
    carriers = "".join(f", Tensor? {name}" for name in operator.carriers)
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
            ctx.given = [t is not None for t in arguments[: inputs + count]]
            # Read in backward, when it holds the calls before: no copy that a hook of saved tensors
            # made in forward will do, and writing to it between the two is meant.
            ctx.chain = carried.chain(arguments)
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
            carried.require_carriers(ctx, wanted)
            with torch.no_grad():
                finished = carried.input_gradients(tensors, scalars, wanted, backend, ctx.chain)
            return None, *first_order_only(operator.name, finished, tensors), *no_gradients

    CarriedFunction.__name__ = CarriedFunction.__qualname__ = carried_name(operator)
    return CarriedFunction
