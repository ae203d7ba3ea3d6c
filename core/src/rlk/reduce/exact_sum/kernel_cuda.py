# SPDX-License-Identifier: Apache-2.0
"""The public steps of an exact sum on the GPU, by the launchers of kernel_cuda.cu."""

from collections.abc import Callable
from pathlib import Path

import torch

from rlk.cuda.header import Layout
from rlk.cuda.launch import DTYPE_CODES, allocator, current_stream
from rlk.cuda.steps import Steps
from rlk.reduce.exact_sum.golden import new

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
_STATE = Layout(
    "ExactSumState",
    (
        ("long long*", "state"),
        ("void*", "out"),
        ("long long", "columns"),
        ("void*", "stream"),
        ("int", "dtype"),
        ("int", "device"),
    ),
)

steps = Steps(
    "exact_sum",
    Path(__file__).with_name("kernel_cuda.cu"),
    {"add_rows": _ROWS, "normalise": _STATE, "round": _STATE},
)
launches = (steps,)


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
    rows: torch.Tensor, call: tuple[str, str] | None
) -> Callable[[int], torch.Tensor]:
    """The normalised state of rows [R, C] alone, for all that look like these.

    Args:
        rows: FP32, BF16 or FP16; their values are not read.
        call: operator and direction in traces.
    Returns:
        A function of the pointer to the rows.
    """
    (count, columns), device, place = rows.shape, rows.get_device(), rows.device
    if not rows.numel():
        return lambda pointer: new(columns, place)
    strides, code = rows.stride(), DTYPE_CODES[rows.dtype]
    add, normalise = steps.enqueuer("add_rows", device), steps.enqueuer("normalise", device)

    def plan(pointer: int) -> torch.Tensor:
        state, stream = new(columns, place), current_stream(device)
        at = state.data_ptr()
        add(pointer, *strides, at, count, columns, stream, code, device, call=call)
        normalise(at, 0, columns, stream, 0, device, call=call)
        return state

    return plan


def merge(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The normalised state of the rows of both."""
    return _normalised(torch.add(a, b).contiguous())


def round(state: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sums rounded once, to nearest even, from the limbs to `dtype`."""
    state = state.contiguous()
    out = torch.empty(state.shape[1], dtype=dtype, device=state.device)
    if out.numel():
        device = state.get_device()
        steps.launch(
            "round", device, state.data_ptr(), out.data_ptr(), state.shape[1],
            current_stream(device), DTYPE_CODES[dtype], device,
        )  # fmt: skip
    return out


def plan_round(like: torch.Tensor, call: tuple[str, str]) -> Callable[[torch.Tensor], torch.Tensor]:
    """`round` for contiguous states whose sums look like a tensor; `call` is named in traces."""
    (columns,), dtype, device = like.shape, like.dtype, like.get_device()
    empty = allocator((columns,), dtype, like.device)
    enqueue, code = steps.enqueuer("round", device), DTYPE_CODES[dtype]

    def plan(state: torch.Tensor) -> torch.Tensor:
        out, stream = empty(), current_stream(device)
        enqueue(state.data_ptr(), out.data_ptr(), columns, stream, code, device, call=call)
        return out

    return plan


def _normalised(state: torch.Tensor) -> torch.Tensor:
    if state.shape[1]:
        device = state.get_device()
        stream = current_stream(device)
        steps.launch("normalise", device, state.data_ptr(), 0, state.shape[1], stream, 0, device)
    return state
