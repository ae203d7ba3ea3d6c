# SPDX-License-Identifier: Apache-2.0
"""The public steps of an exact sum on the GPU, by the launchers of kernel_cuda.cu."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlk.cuda.header import Layout
from rlk.cuda.launch import DTYPE_CODES, current_stream
from rlk.cuda.memory import allocator
from rlk.cuda.steps import Steps
from rlk.reduce.exact_sum import golden
from rlk.reduce.exact_sum.form import SumForm
from rlk.reduce.exact_sum.golden import STATE_ROWS

_ROWS = Layout(
    "ExactSumRows",
    (
        ("const void*", "rows"),
        ("long long", "row_stride"),
        ("long long", "column_stride"),
        ("long long*", "state"),
        ("long long", "count"),
        ("long long", "columns"),
        ("void*", "stream"),
        ("int", "dtype"),
        ("int", "device"),
    ),
)
# From rows, or from a state without strides and count, to `SumResult` of device_round.cuh.
_FINISH = Layout(
    "ExactSumFinish",
    (
        ("const void*", "source"),
        ("long long", "row_stride"),
        ("long long", "column_stride"),
        ("long long", "count"),
        ("long long", "columns"),
        ("long long*", "state"),
        ("void*", "sums"),
        ("void*", "stream"),
        ("int", "dtype"),
        ("int", "sums_dtype"),
        ("int", "form"),
        ("int", "device"),
    ),
)

steps = Steps(
    "exact_sum",
    Path(__file__).with_name("kernel_cuda.cu"),
    {"add_rows": _ROWS, "sum_rows": _FINISH, "finish": _FINISH},
)
launches = (steps,)

# 512: rows of a block of add_rows; so many or less a thread sums alone, without a state to add to.
FEW_ROWS = 512


def add_rows(state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The normalised state after adding rows [R, C] of FP32, BF16 or FP16."""
    state = state.clone(memory_format=torch.contiguous_format)
    if rows.numel():
        device = state.get_device()
        steps.launch(
            "add_rows", device, rows.data_ptr(), *rows.stride(), state.data_ptr(),
            rows.shape[0], rows.shape[1], current_stream(device), DTYPE_CODES[rows.dtype], device,
        )  # fmt: skip
    return _normalised(state)


def plan_sum_rows(
    rows: torch.Tensor,
    parameter: torch.Tensor,
    form: SumForm = SumForm.STATE,
    call: tuple[str, str] | None = None,
) -> Callable[[int], Any]:
    """The sums of rows [R, C] alone, for all that look like these.

    Args:
        rows: FP32, BF16 or FP16; their values are not read.
        parameter: [C], whose gradient they are; its values are not read.
        form: of the result; a state is normalised.
        call: operator and direction in traces.
    Returns:
        A function of the pointer to the rows.
    """
    (count, columns), device, place = rows.shape, rows.get_device(), rows.device
    if not rows.numel():
        make = partial(golden.new, columns, place)
        if form == SumForm.STATE:
            return lambda pointer: make()
        if form == SumForm.ROUNDED:
            return lambda pointer: torch.zeros_like(parameter)
        return lambda pointer: (make().double(), torch.zeros_like(parameter))
    empty = _results(parameter, form)
    strides, code = rows.stride(), DTYPE_CODES[rows.dtype]
    ends = DTYPE_CODES[parameter.dtype], int(form), device
    if count <= FEW_ROWS:
        sum_rows = steps.enqueuer("sum_rows", device)

        def plan_few(pointer: int) -> Any:
            results, at = empty()
            stream = current_stream(device)
            sum_rows(pointer, *strides, count, columns, *at, stream, code, *ends, call=call)
            return results

        return plan_few
    add, finish = steps.enqueuer("add_rows", device), steps.enqueuer("finish", device)

    def plan(pointer: int) -> Any:
        state, stream = golden.new(columns, place), current_stream(device)
        whole = state.data_ptr()
        add(pointer, *strides, whole, count, columns, stream, code, device, call=call)
        results, at = (state, (whole, 0)) if form == SumForm.STATE else empty()
        finish(whole, 0, 0, 0, columns, *at, stream, 0, *ends, call=call)
        return results

    return plan


def merge(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The normalised state of the rows of both."""
    return _normalised(torch.add(a, b).contiguous())


def round(state: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sums rounded once, to nearest even, from the limbs to `dtype`."""
    state = state.contiguous()
    out = torch.empty(state.shape[1], dtype=dtype, device=state.device)
    if out.numel():
        _finish(state, (0, out.data_ptr()), DTYPE_CODES[dtype], SumForm.ROUNDED)
    return out


def plan_round(like: torch.Tensor, call: tuple[str, str]) -> Callable[[torch.Tensor], torch.Tensor]:
    """`round` for contiguous states whose sums look like a tensor; `call` is named in traces."""
    return _plan_finish(like, SumForm.ROUNDED, call)


def plan_carry(like: torch.Tensor, call: tuple[str, str]) -> Callable[[torch.Tensor], Any]:
    """FP64 states and zeros, of contiguous states whose sums look like a tensor."""
    return _plan_finish(like, SumForm.CARRIED, call)


def _plan_finish(
    like: torch.Tensor, form: SumForm, call: tuple[str, str]
) -> Callable[[torch.Tensor], Any]:
    (columns,), device, empty = like.shape, like.get_device(), _results(like, form)
    enqueue, ends = steps.enqueuer("finish", device), (DTYPE_CODES[like.dtype], int(form), device)

    def plan(state: torch.Tensor) -> Any:
        results, at = empty()
        stream = current_stream(device)
        enqueue(state.data_ptr(), 0, 0, 0, columns, *at, stream, 0, *ends, call=call)
        return results

    return plan


def _results(parameter: torch.Tensor, form: SumForm) -> Callable[[], tuple[Any, tuple[int, int]]]:
    """Allocates results in a form, and says where their state and sums are."""
    shape, place = (STATE_ROWS, *parameter.shape), parameter.device
    dtype = torch.float64 if form == SumForm.CARRIED else torch.int64
    new_state, new_sums = (
        allocator(shape, dtype, place),
        allocator(parameter.shape, parameter.dtype, place),
    )

    def state() -> tuple[Any, tuple[int, int]]:
        made = new_state()
        return made, (made.data_ptr(), 0)

    def rounded() -> tuple[Any, tuple[int, int]]:
        made = new_sums()
        return made, (0, made.data_ptr())

    def carried() -> tuple[Any, tuple[int, int]]:
        made = new_state(), new_sums()
        return made, (made[0].data_ptr(), made[1].data_ptr())

    return (state, rounded, carried)[form]


def _normalised(state: torch.Tensor) -> torch.Tensor:
    if state.shape[1]:
        _finish(state, (state.data_ptr(), 0), 0, SumForm.STATE)
    return state


def _finish(state: torch.Tensor, at: tuple[int, int], dtype: int, form: SumForm) -> None:
    device = state.get_device()
    steps.launch(
        "finish", device, state.data_ptr(), 0, 0, 0, state.shape[1], *at, current_stream(device),
        0, dtype, int(form), device,
    )  # fmt: skip
