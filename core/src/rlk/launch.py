# SPDX-License-Identifier: Apache-2.0
"""How backends start work, and the trace in which every launch reports itself."""

import hashlib
import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Launch:
    """One kernel launch or one golden call, described by the code that ran."""

    operator: str
    direction: str  # "forward", "backward", or "" outside an operator
    backend: str
    kernel: str
    binary: str  # digest of the binary, or of the sources where nothing is compiled


# Open traces are process-global: backward runs in autograd's own threads, where neither
# thread-local nor context variables of the caller arrive.
_open: list[list[Launch]] = []
_lock = threading.Lock()


class _Current(threading.local):
    """(operator, direction) on whose behalf a thread launches."""

    call = ("", "")


_current = _Current()


@contextmanager
def trace() -> Iterator[list[Launch]]:
    """List every launch of rlk kernels, forward and backward, from all threads.

    Replays of a CUDA graph are not seen: they launch without any host code.

    Returns:
        A list that grows while the block runs, one `Launch` each.
    """
    launches: list[Launch] = []
    with _lock:
        _open.append(launches)
    try:
        yield launches
    finally:
        with _lock:
            # By identity: two open traces may hold equal lists.
            _open[:] = [other for other in _open if other is not launches]


class operator_call:  # noqa: N801 - used as a function; a generator would take three times as long
    """Name the operator on whose behalf this thread launches, for the scope of a `with`."""

    __slots__ = ("_call", "_outer")

    def __init__(self, operator: str, direction: str) -> None:
        self._call = (operator, direction)

    def __enter__(self) -> None:
        self._outer, _current.call = _current.call, self._call

    def __exit__(self, *_: object) -> None:
        _current.call = self._outer


def record(backend: str, kernel: str, binary: str, call: tuple[str, str] | None = None) -> None:
    """Report a launch; called by the code that launches, never by dispatch.

    `call` is the operator and direction, of `operator_call` if None.
    """
    launch = Launch(*(call or _current.call), backend, kernel, binary)
    with _lock:
        for launches in _open:
            launches.append(launch)


@cache
def source_digest(source_file: str) -> str:
    """SHA-256 of a source file: the identity of code that is not compiled."""
    return hashlib.sha256(Path(source_file).read_bytes()).hexdigest()


def start_golden(kernel: str, source_file: str) -> None:
    """Begin one golden call: refuse a process that flushes subnormals, and report."""
    from rlk.math.golden import require_subnormals

    require_subnormals()
    if _open:
        record("golden", kernel, source_digest(source_file))


@cache
def multiprocessors(device: torch.device) -> int:
    """How many a GPU has; 1 on a CPU, where a kernel's programs run one after another."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch_triton(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Launch a Triton kernel without contraction on its tensors' device, and report it.

    Args:
        kernel: function decorated with `triton.jit`.
        grid: programs per axis; nothing is launched when an axis is 0.
        args: the kernel's run-time arguments.
        meta: its compile-time arguments and launch options.
    """
    if 0 in grid:
        return
    device = next(a.device for a in args if isinstance(a, torch.Tensor))
    if device.type == "cuda":
        # By its index: a device takes torch several times as long to read.
        with torch.cuda.device(device.index):
            compiled = kernel[grid](*args, enable_fp_fusion=False, **meta)
        if _open:
            record("triton", kernel.__name__, compiled.hash)
        return
    from rlk.math.golden import require_subnormals

    require_subnormals()
    kernel[grid](*args, **meta)
    if _open:
        # The interpreter runs the source: there is no binary to name.
        file = inspect.getsourcefile(kernel.fn) or ""
        record("triton", f"{kernel.__name__} (interpreter)", source_digest(file))
