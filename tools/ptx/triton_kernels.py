# SPDX-License-Identifier: Apache-2.0
"""PTX of Triton kernels on a machine without a GPU.

Every backend launches through one function. Here it takes down the kernel and the types of its
arguments instead, while the backends run on small CPU tensors; then each launch is compiled.
"""

import importlib.util
import inspect
import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlk import launch
from rlk.gates.inputs import edge_sizes, real_sizes
from rlk.operator import Operator, Scalar, Tensor

# Kernels are named in a signature by these words.
_POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.float64: "*fp64", torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16",
}  # fmt: skip
# 3: rows of a call; kernels do not depend on it.
_ROWS = 3
# 37: a size that nothing divides, beside those of the workloads.
_ODD_SIZE = 37
# 16 bytes: the alignment that torch gives and Triton specialises on.
_ALIGNMENT = 16
# In a process that compiles: what its parent asks for by index.
_shared: Sequence[tuple["Launch", str]] = ()


@dataclass(frozen=True)
class Launch:
    """A kernel, the type of each argument, its compile-time values and its launch options."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def source(self) -> Path:
        """The file of the kernel."""
        return Path(inspect.getsourcefile(self.kernel.fn) or "")

    @property
    def oldest(self) -> int:
        """The compute capability, times ten, from which on it is launched."""
        return 90 if any(kind.startswith("tensordesc") for _, kind in self.signature) else 80

    def __str__(self) -> str:
        types = ", ".join(kind for _, kind in self.signature if kind != "constexpr")
        return f"{self.kernel.__name__}({types})"


class Recorder:
    """Stands in for `rlk.launch.launch_triton` in every kernel module imported after it."""

    def __init__(self) -> None:
        if os.environ.pop("TRITON_INTERPRET", None) and "triton" in sys.modules:
            raise RuntimeError("check_ptx: triton must not be in its interpreter; unset it")
        loaded = [name for name in sys.modules if name.endswith("kernel_triton")]
        if loaded:
            raise RuntimeError(f"check_ptx: kernels must be imported later, got {loaded[0]}")
        self.launches: dict[Launch, None] = {}
        launch.launch_triton = self.take_down

    def take_down(self, kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        """Note a launch."""
        names = list(kernel.arg_names)
        values = dict(zip(names, args, strict=False))
        values |= {name: value for name, value in meta.items() if name in names}
        constexprs = {p.name for p in kernel.params if p.is_constexpr}
        general = {p.name for p in kernel.params if p.do_not_specialize}
        # Triton makes a constant of an integer argument that is 1.
        ones = {n for n, v in values.items() if type(v) is int and v == 1}
        constant = (constexprs & set(values)) | (ones - general)
        signature = tuple((n, "constexpr" if n in constant else _type(values[n])) for n in names)
        constants = tuple((n, values[n]) for n in names if n in constant)
        options = tuple(sorted((n, v) for n, v in meta.items() if n not in names))
        self.launches[Launch(kernel, signature, constants, options)] = None


def run_operator(operator: Operator) -> None:
    """Call the Triton backend in every dtype and choice, so that it launches."""
    row = operator.backend("triton")
    if row is None:
        return
    module = row.load()
    for inputs, scalars in itertools.product(_inputs(operator), _scalars(operator)):
        results = module.forward(*inputs, **scalars)
        outputs, saved = results[: len(operator.outputs)], results[len(operator.outputs) :]
        # All gradients at once: kernels of fewer hold a part of the same instructions.
        needs = frozenset(t.name for t in operator.returned_gradients)
        kept = operator.kept(inputs, outputs)
        module.backward(*outputs, *kept, *saved, needs=needs, **scalars)


def run_exact_sum() -> None:
    """Call the kernels of the exact sum, which is public by itself."""
    from rlk.reduce.exact_sum import kernel_triton
    from rlk.reduce.exact_sum.golden import FORMATS, new

    state = new(_ODD_SIZE, torch.device("cpu"))
    for dtype in FORMATS:
        kernel_triton.add_rows(state, torch.zeros(_ROWS, _ODD_SIZE, dtype=dtype))
        kernel_triton.round(state, dtype)
    kernel_triton.merge(state, state)


def run_mma_chain() -> None:
    """Call the products of MMA chains, public too, by every tile of their tables."""
    from rlk.reduce.mma_chain import kernel_triton

    size = 4 * _ALIGNMENT
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        operand = torch.zeros(size, size, dtype=dtype)
        for view in (operand, operand[:, 1:]):
            for tile in kernel_triton.candidates(view, view):
                kernel_triton.product(view, view, operand[0], None, dtype, tile)
        start = torch.zeros(size, size)
        kernel_triton.product(operand.t(), operand.t(), None, start, torch.float32)


def available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def compile_launches(pairs: Sequence[tuple[Launch, str]]) -> Iterator[str]:
    """The PTX of launches on architectures, in order, compiled by all processors."""
    # Forked: a kernel cannot be pickled, and nothing was compiled and no GPU touched before.
    context = multiprocessing.get_context("fork")
    workers = min(len(pairs), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(max(1, workers), context, _share, (pairs,)) as pool:
        yield from pool.map(_compile_shared, range(len(pairs)))


def _share(pairs: Sequence[tuple[Launch, str]]) -> None:
    global _shared
    _shared = pairs


def _compile_shared(index: int) -> str:
    return compile_launch(*_shared[index])


def compile_launch(taken: Launch, arch: str) -> str:
    """The PTX of a launch, compiled as `launch_triton` would."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [name for name, _ in taken.signature]
    aligned = {
        (names.index(name),): [["tt.divisibility", _ALIGNMENT]]
        for name, kind in taken.signature
        if kind.startswith("*")
    }
    constants = {(names.index(name),): value for name, value in taken.constants}
    source = ASTSource(taken.kernel, dict(taken.signature), constants, aligned)
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    options = {"enable_fp_fusion": False, **dict(taken.options)}
    return triton.compile(source, target=target, options=options).asm["ptx"]


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if hasattr(value, "block_shape"):
        element = _POINTERS[value.base.dtype].removeprefix("*")
        return f"tensordesc<{element}{list(value.block_shape)}>"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _inputs(operator: Operator) -> Iterator[list[torch.Tensor]]:
    rules = [tensor.dtype for tensor in operator.inputs]
    leading = [1] * (len(operator.row_axes) - 1) + [_ROWS]
    # One size of no model: nothing divides it.
    sizes = real_sizes(operator) + edge_sizes(operator, (_ODD_SIZE,))[-1:]
    for choice, size in itertools.product(itertools.product(*rules), sizes):
        chosen: dict[str, torch.dtype] = {}
        for tensor, rule in zip(operator.inputs, choice, strict=True):
            like = chosen.get(rule.removeprefix("="))
            chosen[tensor.name] = getattr(torch, rule) if like is None else like
        yield [
            torch.ones(_shape(tensor, size, leading), dtype=chosen[tensor.name])
            for tensor in operator.inputs
        ]


def _shape(tensor: Tensor, sizes: Mapping[str, int], leading: list[int]) -> list[int]:
    trailing = [sizes[s] for s in tensor.shape if s != "..."]
    return [*leading, *trailing] if tensor.has_rows else trailing


def _scalars(operator: Operator) -> list[dict[str, Any]]:
    values = [s.choices or (s.default, *_other(s)) for s in operator.scalars]
    names = [s.name for s in operator.scalars]
    return [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*values)]


def _other(scalar: Scalar) -> tuple[Any, ...]:
    """The other value of a flag, which kernels are compiled for."""
    return scalar.also if isinstance(scalar.default, bool) else ()
