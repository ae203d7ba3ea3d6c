# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend of an operator, derived from its declaration and one kernel source."""

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rlk import launch
from rlk.cuda import build, header, probe, toolchain
from rlk.cuda.library import Library, refuse_after_fork
from rlk.errors import ArgumentError
from rlk.operator import FLOATS, Operator, Tensor
from rlk.reduce.exact_sum import STATE_ROWS

# rlk::Dtype of launch.cuh.
DTYPE_CODES = {getattr(torch, name): code for code, name in enumerate(FLOATS)}

_modules: dict[tuple[str, Path], "KernelModule"] = {}
_libraries: dict[Path, Library] = {}
# Guards both, and the first load on each device.
_loading = threading.RLock()


@dataclass(frozen=True)
class _Loaded:
    """The binary for one device and the functions called in it."""

    library: Library
    forward: Callable[..., int]
    backward: Callable[..., int]
    workspace: Callable[..., int]


@dataclass(frozen=True)
class _Result:
    """An output or saved tensor: indices of its sizes, and its dtype or the input that has it."""

    name: str
    axes: tuple[int, ...]
    dtype: torch.dtype | None
    source: int

    def dtype_for(self, inputs: Sequence[torch.Tensor]) -> torch.dtype:
        """The dtype in a call."""
        return self.dtype or inputs[self.source].dtype


def module(operator: Operator, source: Path) -> "KernelModule":
    """The backend module of an operator; the same one at every call.

    Args:
        operator: the declaration the source is written against.
        source: its .cu file, which includes rlk_<operator>.h.
    Raises:
        BackendError: there is neither nvcc nor a built binary for the present GPU.
    """
    with _loading:
        made = _modules.get((operator.name, source))
        if made is None or made.operator is not operator:
            made = KernelModule(operator, source)
            # With nvcc, the first call builds; without, this says early that it cannot.
            if toolchain.nvcc_missing() is not None and torch.cuda.is_available():
                made.binary(device_arch(torch.cuda.current_device()))
            _modules[operator.name, source] = made
        return made


def binary_for(name: str, source: Path, generated: Mapping[str, str], device: int) -> Library:
    """The library of a kernel source for a GPU: built, opened and probed once per process.

    Args:
        name, source, generated: as for `build.build`.
        device: the GPU's index.
    Raises:
        BackendError: it cannot be built or opened, or the process was forked after that.
        PlatformError: the GPU fails the strict-math probe.
    """
    with _loading:
        refuse_after_fork(name)
        path = build.build(source, name, generated, device_arch(device))
        library = _libraries.get(path)
        if library is None:
            library = _libraries[path] = Library(path, name)
        probe.require(library, device)
        return library


def record(kernel: str, library: Library) -> None:
    """Report a launch to the open traces, if there are any."""
    if launch._open:
        launch.record("cuda", kernel, library.digest)


def device_arch(device: int) -> str:
    """The architecture of a GPU, as nvcc names it."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


class KernelModule(ModuleType):
    """`forward` and `backward` of an operator as its declaration describes a backend's."""

    def __init__(self, operator: Operator, source: Path) -> None:
        super().__init__(f"{operator.name} (cuda)")
        self.operator = operator
        self.source = source
        self.generated = {header.header_name(operator): header.header(operator)}
        self._loaded: dict[int, _Loaded] = {}
        self._forward_packer = header.forward_layout(operator).packer
        self._backward_packer = header.backward_layout(operator).packer
        symbols = header.symbols(operator)
        # Where each size of a call is read off: (input, axis).
        self._sizes = [
            next(
                (position, header.axes(tensor).index(symbol))
                for position, tensor in enumerate(operator.inputs)
                if symbol in header.axes(tensor)
            )
            for symbol in symbols
        ]
        results = operator.outputs + operator.saved
        self._results = [_result(operator, tensor, symbols) for tensor in results]
        self._saved = self._results[len(operator.outputs) :]
        self._choices = [
            (s.name, {c: i for i, c in enumerate(s.choices)}) for s in operator.scalars
        ]

    def forward(self, *tensors: torch.Tensor, **scalars: Any) -> tuple[torch.Tensor, ...]:
        """Outputs and saved state of one call, enqueued on the current stream."""
        device = tensors[0].get_device()
        loaded = self._loaded.get(device) or self.load(device)
        values = self._read(self.operator.inputs, tensors, device)
        sizes = [tensors[position].shape[axis] for position, axis in self._sizes]
        place = tensors[0].device
        results = tuple(
            torch.empty([sizes[i] for i in r.axes], dtype=r.dtype_for(tensors), device=place)
            for r in self._results
        )
        values += [result.data_ptr() for result in results]
        self._append_rest(values, tensors, sizes, scalars, device)
        status = loaded.forward(self._forward_packer.pack(*values))
        self._finish(loaded, status, "forward")
        return results

    def backward(
        self, *tensors: torch.Tensor, needs: frozenset[str], **scalars: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """Row gradients and exact states of one call, None for those not needed."""
        operator = self.operator
        start = len(operator.outputs)
        inputs = tensors[start : start + len(operator.inputs)]
        device = inputs[0].get_device()
        loaded = self._loaded.get(device) or self.load(device)
        sizes = [inputs[position].shape[axis] for position, axis in self._sizes]
        self._check_saved(tensors[start + len(inputs) :], inputs, sizes)
        values = self._read(operator.outputs + operator.inputs + operator.saved, tensors, device)
        results = tuple(
            _empty_gradient(declared, tensor) if declared.name in needs else None
            for declared, tensor in zip(operator.inputs, inputs, strict=True)
            if declared.gradient
        )
        values += [0 if result is None else result.data_ptr() for result in results]
        slot = len(values)
        values.append(0)
        self._append_rest(values, inputs, sizes, scalars, device)
        packed = self._backward_packer.pack(*values)
        size = loaded.workspace(packed)
        if size > 0:
            workspace = torch.empty(size, dtype=torch.uint8, device=inputs[0].device)
            values[slot] = workspace.data_ptr()
            packed = self._backward_packer.pack(*values)
        self._finish(loaded, loaded.backward(packed), "backward")
        return results

    def binary(self, arch: str) -> Path:
        """The binary for an architecture such as sm_90, from the cache or compiled into it."""
        return build.build(self.source, self.operator.name, self.generated, arch)

    def compile_only(self, arch: str) -> build.Compiled:
        """PTX and resources for an architecture; nothing is kept."""
        return build.compile_only(self.source, self.operator.name, self.generated, arch)

    def load(self, device: int) -> _Loaded:
        """The binary for a GPU, built, opened and probed once per process."""
        name = self.operator.name
        if device < 0:
            raise ArgumentError(
                f"{name}: {self.operator.inputs[0].name} must be on an NVIDIA GPU, got another "
                "device; choose another backend"
            )
        with _loading:
            loaded = self._loaded.get(device)
            if loaded is None:
                library = binary_for(name, self.source, self.generated, device)
                pointer = [ctypes.c_void_p]
                loaded = self._loaded[device] = _Loaded(
                    library,
                    library.function(f"rlk_{name}_forward", pointer),
                    library.function(f"rlk_{name}_backward", pointer),
                    library.function(f"rlk_{name}_backward_workspace", pointer, ctypes.c_longlong),
                )
            return loaded

    def _read(
        self, declared: Iterable[Tensor], tensors: Iterable[torch.Tensor], device: int
    ) -> list[Any]:
        """Pointer and strides of every tensor that the kernel reads."""
        values: list[Any] = []
        for known, tensor in zip(declared, tensors, strict=True):
            if tensor.get_device() != device or tensor.is_neg():
                raise ArgumentError(
                    f"{self.operator.name}: {known.name} must be a plain tensor on cuda:{device}, "
                    f"got {'a negated view' if tensor.is_neg() else tensor.device}"
                )
            values.append(tensor.data_ptr())
            values += tensor.stride()
        return values

    def _append_rest(
        self,
        values: list[Any],
        inputs: Sequence[torch.Tensor],
        sizes: list[int],
        scalars: Mapping[str, Any],
        device: int,
    ) -> None:
        """Append sizes, stream, dtype codes, scalars and device."""
        values += sizes
        values.append(torch.cuda.current_stream(device).cuda_stream)
        values += [DTYPE_CODES[tensor.dtype] for tensor in inputs]
        values += [codes[scalars[n]] if codes else scalars[n] for n, codes in self._choices]
        values.append(device)

    def _check_saved(
        self, saved: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], sizes: list[int]
    ) -> None:
        """Hold saved state against the declaration: a kernel would read beyond a smaller one."""
        for expected, tensor in zip(self._saved, saved, strict=True):
            shape, dtype = [sizes[i] for i in expected.axes], expected.dtype_for(inputs)
            if list(tensor.shape) != shape or tensor.dtype != dtype:
                raise ArgumentError(
                    f"{self.operator.name}: {expected.name} must be {shape} {dtype}, "
                    f"got {list(tensor.shape)} {tensor.dtype}"
                )

    def _finish(self, loaded: _Loaded, status: int, direction: str) -> None:
        kernel = f"{self.operator.name}_{direction}"
        if status != 0:
            loaded.library.check(status, kernel)
        record(kernel, loaded.library)


def _result(operator: Operator, tensor: Tensor, symbols: tuple[str, ...]) -> _Result:
    (rule,) = tensor.dtype
    axes = tuple(symbols.index(axis) for axis in header.axes(tensor))
    if rule.startswith("="):
        source = [t.name for t in operator.inputs].index(rule[1:])
        return _Result(tensor.name, axes, None, source)
    return _Result(tensor.name, axes, getattr(torch, rule), 0)


def _empty_gradient(declared: Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if declared.gradient == "row":
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    shape = (STATE_ROWS, *tensor.shape)
    return torch.empty(shape, dtype=torch.int64, device=tensor.device)


def _after_fork() -> None:
    """In a forked process the next call loads again, which refuses if CUDA was used before."""
    global _loading
    _loading = threading.RLock()
    for made in _modules.values():
        made._loaded.clear()


os.register_at_fork(after_in_child=_after_fork)
