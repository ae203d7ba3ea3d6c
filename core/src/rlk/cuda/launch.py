# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend of an operator, derived from its declaration and one kernel source."""

import ctypes
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from rlk import dispatch, launch
from rlk.cuda import build, header, probe
from rlk.cuda.library import Library, refuse_after_fork
from rlk.cuda.memory import allocator, backward_results
from rlk.errors import ArgumentError
from rlk.operator import FLOATS, Operator, Tensor
from rlk.plans import Plan
from rlk.reduce.exact_sum.form import SumForm
from rlk.rows import gradient_shape

# rlk::Dtype of launch.cuh.
DTYPE_CODES = {getattr(torch, name): code for code, name in enumerate(FLOATS)}

_pointer = torch.Tensor.data_ptr
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


def module(operator: Operator, source: Path, *, finishes_sums: bool = False) -> "KernelModule":
    """The backend module of an operator; the same one at every call.

    Args:
        operator: the declaration the source is written against.
        source: its .cu file, which includes rlk_<operator>.h.
        finishes_sums: whether its exact sums end in every form, and not as states alone.
    """
    with _loading:
        made = _modules.get((operator.name, source))
        if made is None or made.operator is not operator:
            made = _modules[operator.name, source] = KernelModule(operator, source)
            made.finishes_sums = finishes_sums
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


def current_stream(device: int) -> int:
    """The handle of the stream on which torch launches now."""
    # What torch.cuda.current_stream wraps in an object, at ten times the cost.
    return torch._C._cuda_getCurrentRawStream(device)


def pointers(
    operator: Operator, read: Sequence[Tensor], tensors: Sequence[torch.Tensor]
) -> list[int]:
    """Where the elements of each tensor are; all have some."""
    try:
        found = [*map(_pointer, tensors)]
    except RuntimeError:
        # A wrapper that torch.func left behind; detaching takes it off, or says why not.
        found = [tensor.detach().data_ptr() for tensor in tensors]
    if 0 in found:
        at = found.index(0)
        raise _not_plain(operator, read[at], tensors[at].get_device(), "one without memory")
    return found


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
        self.finishes_sums = False
        self.generated = {header.header_name(operator): header.header(operator)}
        self._loaded: dict[int, _Loaded] = {}
        self._forward_packers = header.forward_layout(operator).packers
        self._backward_packers = header.backward_layout(operator).packers
        symbols = header.symbols(operator)
        # Where each size of a call is read off: (input, axis).
        self._sizes = [
            next(
                (position, header.axes(operator, tensor).index(symbol))
                for position, tensor in enumerate(operator.inputs)
                if symbol in header.axes(operator, tensor)
            )
            for symbol in symbols
        ]
        results = operator.outputs + operator.saved
        self._results = [_result(operator, tensor, symbols) for tensor in results]
        self._codes = [
            (position, {choice: code for code, choice in enumerate(scalar.choices)})
            for position, scalar in enumerate(operator.scalars)
            if scalar.choices
        ]

    def forward(self, *tensors: torch.Tensor, **scalars: Any) -> tuple[torch.Tensor, ...]:
        """Outputs and saved state of one call, enqueued on the current stream."""
        sizes = self._call_sizes(tensors)
        shapes = [[sizes[i] for i in result.axes] for result in self._results]
        plan = self.plan_forward(tensors, shapes)
        return plan(tensors, [scalars[s.name] for s in self.operator.scalars])

    def backward(
        self,
        *tensors: torch.Tensor,
        needs: frozenset[str],
        forms: Mapping[str, SumForm] = MappingProxyType({}),
        into: Mapping[str, torch.Tensor] = MappingProxyType({}),
        **scalars: Any,
    ) -> tuple[Any, ...]:
        """Gradients and exact sums of one call, None for those not needed.

        Args:
            tensors: output gradients, inputs and saved state.
            needs: the inputs whose gradients are needed.
            forms: of exact sums that are not to be states.
            into: memory for gradients of rows, contiguous, by the names of inputs.
            scalars: those of the declaration.
        """
        _, inputs = self.operator.split_backward(tensors)
        places = [place for place, *_ in self.operator.shared_gradients]
        names = [self.operator.inputs[place].name for place in places]
        shapes = [
            gradient_shape(self.operator.inputs[place], inputs[place]) if name in needs else None
            for place, name in zip(places, names, strict=True)
        ]
        ends = [forms.get(name, SumForm.STATE) for name in names]
        plan = self.plan_backward(tensors, shapes, forms=ends, into=[*map(into.get, names)])
        return plan(tensors, [scalars[s.name] for s in self.operator.scalars])

    def plan_forward(
        self,
        rows: Sequence[torch.Tensor],
        shapes: Sequence[Sequence[int]],
        call: tuple[str, str] | None = None,
    ) -> Plan:
        """`forward` for all calls that look alike.

        Args:
            rows: the inputs of one of them, as rows. The plan's own may have leading axes, if
                rows are views of them.
            shapes: of the results.
            call: operator and direction in traces.
        """
        loaded, device = self._load_for(rows[0])
        operator, read = self.operator, self.operator.inputs
        pack, between, pack_scalars = [packer.pack for packer in self._forward_packers]
        constants = between(*self._constants(read, rows, rows, device))
        empties = [
            allocator(shape, result.dtype_for(rows), rows[0].device)
            for shape, result in zip(shapes, self._results, strict=True)
        ]
        launch_forward, coded = loaded.forward, self._coded

        def plan(tensors: Sequence[torch.Tensor], scalars: Sequence[Any]) -> tuple[Any, ...]:
            at = pointers(operator, read, tensors)
            results = tuple([empty() for empty in empties])
            at += map(_pointer, results)
            head, tail = pack(*at, current_stream(device)), pack_scalars(*coded(scalars))
            status = launch_forward(head + constants + tail)
            if status or launch._open:
                self._report(loaded, status, "forward", call)
            return results

        return plan

    def plan_backward(
        self,
        rows: Sequence[torch.Tensor],
        shapes: Sequence[Sequence[int] | None],
        call: tuple[str, str] | None = None,
        *,
        forms: Sequence[SumForm] = (),
        into: Sequence[torch.Tensor | None] = (),
    ) -> Plan:
        """`backward` for all calls that look alike.

        Args:
            rows: output gradients, inputs and saved state of one of them, as for `plan_forward`.
            shapes: of the gradients and states, None where not needed.
            call: operator and direction in traces.
            forms: of all gradients; those that are no exact sums have that of a state.
            into: memory for gradients of one call, None where it is to be allocated.
        """
        operator, start = self.operator, len(self.operator.outputs)
        inputs = rows[start : start + len(operator.inputs)]
        loaded, device = self._load_for(inputs[0])
        read = operator.outputs + operator.inputs + operator.saved
        pack, between, pack_scalars = [packer.pack for packer in self._backward_packers]
        differentiable = [(operator.inputs[i], inputs[i]) for i, *_ in operator.shared_gradients]
        forms = forms or [SumForm.STATE] * len(differentiable)
        ends = [
            int(form)
            for (declared, _), form in zip(differentiable, forms, strict=True)
            if declared.gradient == "parameter"
        ]
        constants = between(*self._constants(read, rows, inputs, device, ends))
        place = inputs[0].device
        empties, returned = backward_results(differentiable, shapes, forms, place, into)
        size_workspace, launch_backward = loaded.workspace, loaded.backward
        coded = self._coded

        def plan(tensors: Sequence[torch.Tensor], scalars: Sequence[Any]) -> tuple[Any, ...]:
            at = pointers(operator, read, tensors)
            results = tuple([None if empty is None else empty() for empty in empties])
            at += [0 if result is None else result.data_ptr() for result in results]
            stream, rest = current_stream(device), constants + pack_scalars(*coded(scalars))
            packed = pack(*at, 0, stream) + rest
            size = size_workspace(packed)
            if size > 0:
                workspace = torch.empty_strided((size,), (1,), dtype=torch.uint8, device=place)
                packed = pack(*at, workspace.data_ptr(), stream) + rest
            status = launch_backward(packed)
            if status or launch._open:
                self._report(loaded, status, "backward", call)
            return results if returned is None else returned(results)

        return plan

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

    def _load_for(self, tensor: torch.Tensor) -> tuple[_Loaded, int]:
        device = tensor.get_device()
        return self._loaded.get(device) or self.load(device), device

    def _call_sizes(self, inputs: Sequence[torch.Tensor]) -> list[int]:
        return [inputs[position].shape[axis] for position, axis in self._sizes]

    def _constants(
        self,
        read: Sequence[Tensor],
        rows: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        device: int,
        forms: Sequence[int] = (),
    ) -> list[int]:
        """Strides, sizes, dtype codes, forms of sums and device."""
        for declared, tensor in zip(read, rows, strict=True):
            if tensor.get_device() != device or tensor.is_neg():
                negated = "a negated view" if tensor.is_neg() else str(tensor.device)
                raise _not_plain(self.operator, declared, device, negated)
        strides = [stride for tensor in rows for stride in tensor.stride()]
        codes = [DTYPE_CODES[tensor.dtype] for tensor in inputs]
        return [*strides, *self._call_sizes(inputs), *codes, *forms, device]

    def _coded(self, scalars: Sequence[Any]) -> Sequence[Any]:
        """Scalars as the struct holds them: an index for each that names a choice."""
        if not self._codes:
            return scalars
        coded = list(scalars)
        for position, codes in self._codes:
            coded[position] = codes[coded[position]]
        return coded

    def _report(
        self, loaded: _Loaded, status: int, direction: str, call: tuple[str, str] | None
    ) -> None:
        kernel = f"{self.operator.name}_{direction}"
        loaded.library.check(status, kernel)
        launch.record("cuda", kernel, loaded.library.digest, call)


def _result(operator: Operator, tensor: Tensor, symbols: tuple[str, ...]) -> _Result:
    (rule,) = tensor.dtype
    axes = tuple(symbols.index(axis) for axis in header.axes(operator, tensor))
    if rule.startswith("="):
        source = [t.name for t in operator.inputs].index(rule[1:])
        return _Result(tensor.name, axes, None, source)
    return _Result(tensor.name, axes, getattr(torch, rule), 0)


def _not_plain(operator: Operator, declared: Tensor, device: int, got: str) -> ArgumentError:
    return ArgumentError(
        f"{operator.name}: {declared.name} must be a plain tensor on cuda:{device}, got {got}"
    )


def _after_fork() -> None:
    """In a forked process the next call loads again, which refuses if CUDA was used before."""
    global _loading
    _loading = threading.RLock()
    for made in _modules.values():
        made._loaded.clear()
    dispatch.forget_plans()


os.register_at_fork(after_in_child=_after_fork)
