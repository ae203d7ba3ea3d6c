# SPDX-License-Identifier: Apache-2.0
"""The public steps of an exact sum on the GPU, by the launchers of kernel_cuda.cu."""

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rlk import launch
from rlk.cuda import build
from rlk.cuda.header import Layout, library_header
from rlk.cuda.launch import DTYPE_CODES, binary_for, current_stream
from rlk.cuda.library import Library

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
_ENTRIES = (("add_rows", _ROWS), ("normalise", _STATE), ("round", _STATE))


def add_rows(state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The normalised state after adding rows [R, C] of FP32, BF16 or FP16."""
    state = state.clone(memory_format=torch.contiguous_format)
    if rows.numel():
        device = state.get_device()
        _launch(
            "add_rows", _ROWS, device, rows.data_ptr(), *rows.stride(), state.data_ptr(),
            rows.shape[0], rows.shape[1], current_stream(device), DTYPE_CODES[rows.dtype], device,
        )  # fmt: skip
    return _normalised(state)


def merge(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The normalised state of the rows of both."""
    return _normalised(torch.add(a, b).contiguous())


def round(state: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sums rounded once, to nearest even, from the limbs to `dtype`."""
    state = state.contiguous()
    out = torch.empty(state.shape[1], dtype=dtype, device=state.device)
    if out.numel():
        device = state.get_device()
        _launch(
            "round", _STATE, device, state.data_ptr(), out.data_ptr(), state.shape[1],
            current_stream(device), DTYPE_CODES[dtype], device,
        )  # fmt: skip
    return out


def compile_only(arch: str) -> build.Compiled:
    """PTX and resources of the launchers for an architecture; nothing is kept."""
    return build.compile_only(_source(), "exact_sum", _generated(), arch)


def _normalised(state: torch.Tensor) -> torch.Tensor:
    if state.shape[1]:
        device = state.get_device()
        stream = current_stream(device)
        _launch("normalise", _STATE, device, state.data_ptr(), 0, state.shape[1], stream, 0, device)
    return state


def _launch(entry: str, layout: Layout, device: int, *values: int) -> None:
    library, functions = _library(device)
    status = functions[entry](layout.packer.pack(*values))
    if status or launch._open:
        library.check(status, f"exact_sum.{entry}")
        launch.record("cuda", f"exact_sum.{entry}", library.digest)


@cache
def _library(device: int) -> tuple[Library, dict[str, Callable[..., Any]]]:
    library = binary_for("exact_sum", _source(), _generated(), device)
    argument = [ctypes.c_char_p]
    functions = {e: library.function(f"rlk_exact_sum_{e}", argument) for e, _ in _ENTRIES}
    return library, functions


def _source() -> Path:
    return Path(__file__).with_name("kernel_cuda.cu")


def _generated() -> dict[str, str]:
    return {"rlk_exact_sum.h": library_header("exact_sum", _ENTRIES)}


# In a forked process the next call asks for the library again, which is refused.
os.register_at_fork(after_in_child=_library.cache_clear)
