# SPDX-License-Identifier: Apache-2.0
"""From a declaration to operators of torch: schema, fake kernels, autograd and the eager call.

`publish(operator)` defines `torch.ops.rlk.<name>` and `torch.ops.rlk.<name>_backward` and returns
the function that an operator folder calls. Plain eager tensors take a short path around the
dispatcher; everything else (compile, export, fake tensors, modes, subclasses) goes through it.
Both end in one `Execution`, so bits do not depend on the path.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C import _AutoDispatchBelowAutograd

from rlk import sharding
from rlk.arguments import check_gradients, check_tensors
from rlk.autograd import first_order_only, require_autograd, require_reverse_mode
from rlk.carried import Carried, Carriers, carried_name, schema, wants_gradient
from rlk.errors import ArgumentError, RlkError
from rlk.execution import Execution
from rlk.linear import require_linear
from rlk.operator import Operator
from rlk.plans import Forms, rounded_forms
from rlk.reduce import exact_sum
from rlk.reduce.exact_sum.form import SumForm
from rlk.rows import empty_gradients, empty_outputs

_library = torch.library.Library("rlk", "FRAGMENT")
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_SCHEMA_TYPES = {float: "float", str: "str", bool: "bool"}
# Every published operator by name.
PUBLISHED: dict[str, "Published"] = {}


class Published(Execution):
    """An operator that torch knows, and the call to it."""

    def __init__(self, operator: Operator) -> None:
        super().__init__(operator)
        self._rounding = rounded_forms(operator)
        _define(self)
        self.forward_op = getattr(torch.ops.rlk, operator.name).default
        self.backward_op = getattr(torch.ops.rlk, f"{operator.name}_backward").default
        self.chained_op = _define_chained(self) if operator.chain_parameters else None
        self.carried = _define_carried(self) if operator.parameters else None

    def __call__(
        self,
        tensors: Sequence[Any],
        scalars: Mapping[str, Any],
        backend: str | None = None,
        carriers: Carriers = (),
    ) -> tuple[torch.Tensor, ...]:
        """The operator's outputs, without its saved state.

        `carriers`, as the operator names them, take what gradients are summed in; None, as for
        those missing at the end, finishes the gradient in the call.
        """
        arguments = self.arguments(tensors, scalars, backend)
        for carrier in carriers:
            if carrier is not None:
                return self._apply_carried(arguments, carriers)[: self._outputs]
        return self.apply(arguments)[: self._outputs]

    def apply(self, arguments: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Plain tensors go straight on, everything else through the dispatcher."""
        tensors = arguments[: self._inputs]
        if is_plain(tensors):
            return self.call(*arguments)
        check_tensors(self.operator, tensors)
        if not torch.compiler.is_compiling():
            sharding.register_if_imported()
        return _all_of(self.forward_op(*arguments))

    def _apply_carried(
        self, arguments: Sequence[Any], carriers: Carriers
    ) -> tuple[torch.Tensor, ...]:
        names = self.operator.carriers
        if self.carried is None or len(carriers) > len(names):
            raise RlkError(
                f"{self.operator.name}: carriers must be at most {len(names)}, got {len(carriers)}"
            )
        carriers = (*carriers, *[None] * (len(names) - len(carriers)))
        if not is_plain((*arguments[: self._inputs], *(c for c in carriers if c is not None))):
            check_tensors(self.operator, arguments[: self._inputs])
            op = getattr(torch.ops.rlk, carried_name(self.operator)).default
            return _all_of(op(*self.carried.arguments(arguments, carriers)))
        return self.carried.call(*self.carried.arguments(arguments, carriers))

    def forward_pass(self, keyset: Any, arguments: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Through the dispatcher, below autograd, where it called."""
        if keyset is None:
            return self.run_forward(arguments)
        return _below_autograd(self.forward_op, keyset, arguments)

    def backward_pass(
        self,
        tensors: tuple[torch.Tensor, ...],
        scalars: Sequence[Any],
        needs: tuple[bool, ...],
        requested: str,
        initial: torch.Tensor | None = None,
        forms: Forms = (),
    ) -> tuple[Any, ...]:
        """Through the dispatcher where it may be listening, whatever the forward found.

        It knows states alone: their forms are made of them here.
        """
        if is_plain(tensors):
            return self.run_backward(tensors, scalars, needs, requested, initial, forms)
        if initial is not None and self.chained_op is not None:
            results = _all_of(self.chained_op(*tensors, initial, *scalars, *needs, requested))
        else:
            results = _all_of(self.backward_op(*tensors, *scalars, *needs, requested))
        if not any(forms):
            return results
        inputs, finished = tensors[self._outputs :], []
        groups = self.operator.shared_gradients
        for (place, *_), result, needed, form in zip(groups, results, needs, forms, strict=True):
            end: Any = result
            if needed and form == SumForm.ROUNDED:
                end = self._rounded(result, inputs[place], inputs[0], requested)
            elif needed and form == SumForm.CARRIED:
                end = exact_sum.carried(result, inputs[place])
            finished.append(end)
        return tuple(finished)

    def input_gradients(
        self,
        tensors: tuple[torch.Tensor, ...],
        scalars: Sequence[Any],
        needs: tuple[bool, ...],
        requested: str,
    ) -> Sequence[torch.Tensor | None]:
        """Through the dispatcher where it may be listening: sums and their rounding apart."""
        if is_plain(tensors):
            return self._gradients.find(tensors, needs, requested)(tensors, scalars)
        results = self.backward_pass(tensors, scalars, needs, requested, None, self._rounding)
        finished: list[torch.Tensor | None] = [None] * self._inputs
        for places, result, needed in zip(
            self.operator.shared_gradients, results, needs, strict=True
        ):
            for place in places if needed else ():
                finished[place] = result
        return finished

    def _rounded(
        self, state: Any, parameter: torch.Tensor, rows: torch.Tensor, requested: str
    ) -> torch.Tensor:
        if rows.numel() == 0:
            # A sum over no rows is known without a launch.
            return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        return self.round_state(state, parameter.dtype, requested)

    def transpose(
        self,
        tensors: Sequence[torch.Tensor],
        scalars: Sequence[Any],
        needs: Sequence[bool],
        requested: str,
    ) -> Sequence[torch.Tensor | None]:
        """Through the dispatcher where it may be listening."""
        if is_plain(tensors):
            return super().transpose(tensors, scalars, needs, requested)
        return _all_of(self.backward_op(*tensors, *scalars, *needs, requested))

    def transpose_pass(self, keyset: Any, arguments: Any) -> tuple[torch.Tensor | None, ...]:
        """Through the dispatcher, below autograd, where it called."""
        if keyset is None:
            return super().transpose_pass(keyset, arguments)
        return _below_autograd(self.backward_op, keyset, arguments)

    def round_state(self, state: torch.Tensor, dtype: torch.dtype, requested: str) -> torch.Tensor:
        """Through the dispatcher where it may be listening."""
        if is_plain((state,)):
            return super().round_state(state, dtype, requested)
        return torch.ops.rlk.exact_sum_round(state, dtype, requested)


def publish(operator: Operator) -> Published:
    """Define an operator for torch from its declaration.

    Raises:
        RlkError: torch already has an operator of this name, or a linear operator is none.
    """
    if operator.linear:
        require_linear(operator)
    backward = f"{operator.name}_backward"
    for name in (operator.name, backward, f"{backward}_chained", carried_name(operator)):
        if hasattr(torch.ops.rlk, name):
            raise RlkError(
                f"{operator.name}: name must be new to torch, got torch.ops.rlk.{name} defined "
                "before; rename the operator or publish it once"
            )
    PUBLISHED[operator.name] = Published(operator)
    sharding.declare(operator)
    return PUBLISHED[operator.name]


def is_plain(tensors: Sequence[Any]) -> bool:
    """Whether these are ordinary eager tensors with no compiler, mode or transform about."""
    if torch.compiler.is_compiling():
        return False
    for t in tensors:
        if type(t) not in _PLAIN_TYPES or t.is_meta:
            return False
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None  # of torch.jit.trace
    )


def _below_autograd(op: Any, keyset: Any, arguments: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    with _AutoDispatchBelowAutograd():
        return _all_of(op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments))


def _all_of(results: Any) -> tuple[torch.Tensor, ...]:
    """What an operator of torch returns, which for one result is the tensor itself."""
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def _define(published: Published) -> None:
    operator = published.operator
    scalars = "".join(f", {_SCHEMA_TYPES[type(s.default)]} {s.name}" for s in operator.scalars)
    inputs = ", ".join(f"Tensor {t.name}" for t in operator.inputs)
    results = ", ".join(f"Tensor {t.name}" for t in operator.outputs + operator.saved)
    _library.define(f"{operator.name}({inputs}{scalars}, str backend) -> ({results})")
    gradients = ", ".join(f"Tensor d{t.name}" for t in operator.outputs)
    saved = "".join(f", Tensor {t.name}" for t in operator.saved)
    needs = "".join(f", bool need_{t.name}" for t in operator.returned_gradients)
    backward_results = ", ".join(
        f"Tensor d{t.name}" + ("_state" if t.gradient == "parameter" else "")
        for t in operator.returned_gradients
    )
    _library.define(
        f"{operator.name}_backward({gradients}, {inputs}{saved}{scalars}{needs}, str backend)"
        f" -> ({backward_results})"
    )
    backward = f"{operator.name}_backward"
    _register(operator.name, published.forward, _fake_forward(published))
    _register(backward, published.backward, _fake_backward(published))
    _library.impl(operator.name, _autograd_forward(published), "Autograd", with_keyset=True)
    _library.impl(backward, _autograd_backward(published), "Autograd", with_keyset=True)


def _define_chained(published: Published) -> Any:
    """The backward operator whose chain over rows goes on from another one."""
    name = f"{published.operator.name}_backward_chained"
    _, _, rest = str(published.backward_op._schema).partition("(")
    arguments = rest.split(", ")
    declared = published.operator
    behind = len(declared.outputs) + len(declared.inputs) + len(declared.saved)
    arguments.insert(behind, "Tensor initial")
    _library.define(f"{name}({', '.join(arguments)}")

    def fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
        initial, rest = published.split_initial(arguments)
        results = _fake_backward(published)(*rest)
        return tuple(
            torch.empty_like(initial) if t.gradient == "chain" else r
            for t, r in zip(declared.returned_gradients, results, strict=True)
        )

    _register(name, published.chained_backward, fake)
    _library.impl(name, _first_order(published, name), "Autograd", with_keyset=True)
    return getattr(torch.ops.rlk, name).default


def _define_carried(published: Published) -> Carried:
    carried, operator = Carried(published), published.operator
    name = carried_name(operator)
    _library.define(schema(operator, str(published.forward_op._schema)))

    def function(*arguments: Any) -> tuple[torch.Tensor, ...]:
        return published.forward(*carried.without_carriers(arguments))

    def fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
        return _fake_forward(published)(*carried.without_carriers(arguments))

    def kernel(keyset: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
        tensors = arguments[: carried.inputs + carried.count]
        require_reverse_mode(operator.name, tensors)
        if wants_gradient(tensors):
            require_autograd(operator.name)
            return carried.function.apply(keyset, *arguments)
        plain = carried.without_carriers(arguments)
        return _below_autograd(published.forward_op, keyset, plain)

    _register(name, function, fake)
    _library.impl(name, _unwrap_single(kernel), "Autograd", with_keyset=True)
    return carried


def _register(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _library.impl(name, _unwrap_single(function), "CompositeExplicitAutograd")
    _library.impl(name, _refuse_vmap(name), "FuncTorchBatched")
    torch.library.register_fake(f"rlk::{name}", _unwrap_single(fake), lib=_library)


def _refuse_vmap(name: str) -> Callable[..., Any]:
    # The loop that torch would run instead rounds a parameter gradient once per slice.
    def refuse(*arguments: Any) -> Any:
        raise ArgumentError(
            f"{name}: the batch must be leading axes, got torch.vmap; call it on the whole batch"
        )

    return refuse


def _unwrap_single(function: Callable[..., Any]) -> Callable[..., Any]:
    # A schema with one result wants the tensor itself, not a tuple of one.
    def call(*arguments: Any) -> Any:
        results = function(*arguments)
        return results if len(results) > 1 else results[0]

    return call


def _fake_forward(published: Published) -> Callable[..., Any]:
    def fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
        tensors = arguments[: len(published.operator.inputs)]
        check_tensors(published.operator, tensors)
        return empty_outputs(published.operator, tensors)

    return fake


def _fake_backward(published: Published) -> Callable[..., Any]:
    def fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
        tensors, _, needs = published.split_backward(arguments)
        gradients, inputs = published.operator.split_backward(tensors)
        check_tensors(published.operator, inputs)
        check_gradients(published.operator, gradients, inputs)
        return empty_gradients(published.operator, tensors, needs)

    return fake


def _autograd_forward(published: Published) -> Callable[..., Any]:
    def kernel(keyset: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
        sharding.register_if_imported()
        tensors = arguments[: len(published.operator.inputs)]
        require_reverse_mode(published.operator.name, tensors)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            require_autograd(published.operator.name)
            return published.function.apply(keyset, *arguments)
        return _below_autograd(published.forward_op, keyset, arguments)

    return _unwrap_single(kernel)


def _autograd_backward(published: Published) -> Callable[..., Any]:
    def linear(keyset: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
        gradients = arguments[: len(published.operator.outputs)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in gradients):
            return published.transposed.apply(keyset, *arguments)
        return _below_autograd(published.backward_op, keyset, arguments)

    if published.operator.linear:
        return _unwrap_single(linear)
    return _first_order(published, f"{published.operator.name}_backward")


def _first_order(published: Published, name: str) -> Callable[..., Any]:
    """The autograd kernel of a backward operator that nobody may differentiate."""
    op = getattr(torch.ops.rlk, name).default

    def kernel(keyset: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
        results = _below_autograd(op, keyset, arguments)
        return tuple(first_order_only(published.operator.name, results, arguments))

    return _unwrap_single(kernel)


def _round_kernel(state: torch.Tensor, dtype: torch.dtype, backend: str) -> torch.Tensor:
    return exact_sum.round(state, dtype, backend=exact_sum.rounding_backend(backend))


_library.define("exact_sum_round(Tensor state, ScalarType dtype, str backend) -> Tensor")
_library.impl("exact_sum_round", _round_kernel, "CompositeExplicitAutograd")


@torch.library.register_fake("rlk::exact_sum_round", lib=_library)
def _fake_round(state: torch.Tensor, dtype: torch.dtype, backend: str) -> torch.Tensor:
    return state.new_empty(state.shape[1:], dtype=dtype)


sharding.declare_rounding(torch.ops.rlk.exact_sum_round.default)
