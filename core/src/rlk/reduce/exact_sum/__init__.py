# SPDX-License-Identifier: Apache-2.0
"""Exact column sums: the state of a sum over rows, which any order of adding leaves alike."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from rlk import backends
from rlk.arguments import dtype_name
from rlk.dispatch import AUTO, Primitive, choose
from rlk.errors import ArgumentError, BackendError, GradientError
from rlk.launch import operator_call, start_golden
from rlk.reduce.exact_sum import golden
from rlk.reduce.exact_sum.form import SumForm
from rlk.reduce.exact_sum.golden import DIVISORS, FORMATS, STATE_ROWS

__all__ = ["STATE_ROWS", "add_rows", "merge", "new", "round"]


def new(columns: int, device: torch.device | str | None = None) -> torch.Tensor:
    """The state of an empty sum.

    Args:
        columns: C, the number of sums.
        device: where the state lives; torch's default device if None.
    Returns:
        state: [13, C], int64. Rows 0 to 9 hold sum(state[k] * 2^(32 * k - 149)), rows 10 to 12
            count NaN, +Inf and -Inf. States may be added elementwise, as by an all-reduce.
    Raises:
        ArgumentError: columns is not a count, or device no device of torch.
    """
    if isinstance(columns, bool) or not isinstance(columns, int) or columns < 0:
        raise _error("columns", "a non-negative int", repr(columns))
    try:
        place = None if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise _error("device", "a device of torch", repr(device)) from None
    return golden.new(columns, place)


def add_rows(
    state: torch.Tensor, rows: torch.Tensor, *, backend: str | None = None
) -> torch.Tensor:
    """A new state that also holds `rows`.

        sum[c] += rows[0, c] + ... + rows[R - 1, c], exactly

    Args:
        state: [13, C], int64; not written to.
        rows: [R, C], FP32, BF16 or FP16, any strides, without gradient; R may be 0.
        backend: "cuda", "triton" or "golden"; None chooses by device.
    Returns:
        state: [13, C], int64, normalised: rows 0 to 8 in [0, 2^32).
    Gradients: none.
    Order: none; the sum is exact, so the state's bits do not depend on it.
    Raises:
        ArgumentError: shape, dtype or device does not fit; the message names the argument.
        BackendError: the backend asked for cannot run here.
        GradientError: rows want a gradient, which the state would drop.
    """
    _check_state("state", state)
    _check_dense("rows", rows)
    if torch.is_grad_enabled() and rows.requires_grad:
        raise GradientError(
            "exact_sum: rows must be without gradient, got requires_grad=True; detach it"
        )
    if rows.dtype not in FORMATS:
        raise _error("rows", "float32, bfloat16 or float16", dtype_name(rows.dtype))
    columns = state.shape[1]
    if rows.dim() != 2 or rows.shape[1] != columns:
        raise _error("rows", f"[R, C] with C={columns}", str(list(rows.shape)))
    _check_device("rows", rows, "state", state)
    step = _step("add_rows", state.device, backend)
    return step(state, rows.detach().resolve_neg())


def merge(a: torch.Tensor, b: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """A new state that holds the rows of both.

        sum[c] = a[c] + b[c], exactly

    Args:
        a: [13, C], int64.
        b: as a.
        backend: "cuda", "triton" or "golden"; None chooses by device.
    Returns:
        state: [13, C], int64, normalised.
    Order: none.
    Raises:
        ArgumentError: shape, dtype or device does not fit; the message names the argument.
        BackendError: the backend asked for cannot run here.
    """
    _check_state("a", a)
    _check_state("b", b)
    if a.shape != b.shape:
        raise _error("b", f"{list(a.shape)} like a", str(list(b.shape)))
    _check_device("b", b, "a", a)
    return _step("merge", a.device, backend)(a, b)


def round(
    state: torch.Tensor, dtype: torch.dtype, *, divide_by: int = 1, backend: str | None = None
) -> torch.Tensor:
    """The sums, or exact quotients of them, rounded once.

        y[c] = RN(sum[c] / divide_by), to nearest even in dtype, subnormals kept, overflow to Inf

    A non-zero sum that rounds to zero keeps its sign; an exactly zero or empty sum is +0. NaN, or
    Inf of both signs, gives NaN; Inf of one sign gives that Inf.

    Args:
        state: [13, C], int64, normalised or not.
        dtype: torch.float32, torch.bfloat16 or torch.float16.
        divide_by: a whole number, at least 1 and less than 2^47, as of all tokens of a step.
        backend: "cuda", "triton" or "golden"; None chooses by device. Only golden divides,
            on any device.
    Returns:
        y: [C] of dtype.
    Order: none.
    Raises:
        ArgumentError: shape, dtype or divisor does not fit; the message names the argument.
        BackendError: the backend asked for cannot run here, or cannot divide.
    """
    _check_state("state", state)
    if not isinstance(dtype, torch.dtype) or dtype not in FORMATS:
        raise _error("dtype", "float32, bfloat16 or float16", str(dtype).removeprefix("torch."))
    check_divisor("exact_sum", divide_by)
    if divide_by == 1:
        return _step("round", state.device, backend)(state, dtype)
    if backend not in (None, AUTO, "golden"):
        raise BackendError(
            f'exact_sum: backend must be "golden" or None for a quotient, got {backend!r}'
        )
    return _step("round", state.device, "golden")(state, dtype, divide_by)


def plan_round(
    like: torch.Tensor, backend: str | None, call: tuple[str, str]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`round` for contiguous states whose sums have the shape, dtype and device of a tensor.

    Args:
        like: [C], FP32, BF16 or FP16; its values are not read.
        backend: as of `round`.
        call: operator and direction in traces.
    Returns:
        A function from such a state, which it does not check, to y.
    Raises:
        BackendError: the backend asked for cannot run here.
    """
    choice = choose(_STEPS, like.device, AUTO if backend is None else backend)
    if hasattr(choice.module, "plan_round"):
        return choice.module.plan_round(like, call)
    dtype = like.dtype

    def plan(state: torch.Tensor) -> torch.Tensor:
        with operator_call(*call):
            return round(state, dtype, backend=backend)

    return plan


def plan_finish(
    parameter: torch.Tensor,
    backend: str | None,
    call: tuple[str, str],
    form: SumForm,
    is_empty: bool,
) -> Callable[[torch.Tensor], Any]:
    """From contiguous states of a parameter's gradient to another form, for all that look alike.

    Args:
        parameter: FP32, BF16 or FP16; its values are not read.
        backend: as of `round`.
        call: operator and direction in traces.
        form: ROUNDED or CARRIED.
        is_empty: whether the sum is one of nothing, so that its end is known without a launch.
    Returns:
        A function from such a state, which it does not check.
    Raises:
        BackendError: the backend asked for cannot run here.
    """
    shape, dtype, device = parameter.shape, parameter.dtype, parameter.device
    if form == SumForm.ROUNDED and not is_empty:
        return plan_round(parameter, backend, call)
    if form == SumForm.ROUNDED:
        return lambda state: torch.zeros(shape, dtype=dtype, device=device)
    if parameter.dim() == 1 and not is_empty:
        choice = choose(_STEPS, device, AUTO if backend is None else backend)
        if hasattr(choice.module, "plan_carry"):
            return choice.module.plan_carry(parameter, call)
    return lambda state: carried(state, parameter)


def carried(state: torch.Tensor, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The state in FP64, to which autograd adds without rounding, and zeros like the parameter."""
    # Digits are below 2^53: exact.
    return state.double(), torch.zeros_like(parameter, memory_format=torch.contiguous_format)


def rounding_backend(requested: str) -> str | None:
    """The backend that rounds a state for a call of an operator on backend `requested`."""
    return requested if requested in BACKENDS else None


def check_divisor(name: str, divide_by: int) -> None:
    """Refuse what `round` does not divide by; `name` begins the message.

    Args:
        name: of the function that was called.
        divide_by: as of `round`.
    Raises:
        ArgumentError: divide_by is no int from 1 to 2^47 - 1.
    """
    whole = isinstance(divide_by, int) and not isinstance(divide_by, bool)
    if not whole or not 1 <= divide_by < DIVISORS:
        raise ArgumentError(
            f"{name}: divide_by must be an int, at least 1 and less than 2^47, got {divide_by!r}"
        )


def _load_cuda() -> ModuleType:
    from rlk.reduce.exact_sum import kernel_cuda

    return kernel_cuda


def _load_triton() -> ModuleType:
    from rlk.reduce.exact_sum import kernel_triton

    return kernel_triton


_STEPS = Primitive(
    "exact_sum",
    (backends.cuda(_load_cuda), backends.triton(_load_triton), backends.golden(lambda: golden)),
)
BACKENDS = tuple(b.name for b in _STEPS.backends)


def _step(name: str, device: torch.device, requested: str | None) -> Any:
    """The function `name` of the backend that runs this call."""
    choice = choose(_STEPS, device, AUTO if requested is None else requested)
    if choice.module is golden:
        start_golden(f"exact_sum.{name}", golden.__file__)
    return getattr(choice.module, name)


def _check_state(name: str, state: torch.Tensor) -> None:
    _check_dense(name, state)
    if state.dtype != torch.int64:
        raise _error(name, "int64", dtype_name(state.dtype))
    if state.dim() != 2 or state.shape[0] != STATE_ROWS:
        raise _error(name, f"[{STATE_ROWS}, C]", str(list(state.shape)))


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise _error(name, "a tensor", type(tensor).__name__)
    if tensor.layout != torch.strided:
        raise _error(name, "a dense tensor", str(tensor.layout))
    if tensor.is_nested:
        raise _error(name, "a dense tensor", "a nested tensor")


def _check_device(name: str, tensor: torch.Tensor, like: str, other: torch.Tensor) -> None:
    if tensor.device != other.device:
        raise _error(name, f"on {other.device} like {like}", str(tensor.device))


def _error(name: str, requirement: str, actual: str) -> ArgumentError:
    return ArgumentError(f"exact_sum: {name} must be {requirement}, got {actual}")
