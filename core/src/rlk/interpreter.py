# SPDX-License-Identifier: Apache-2.0
"""Triton's CPU interpreter, made to round like the GPU.

The interpreter of Triton 3.6 to 3.9 truncates FP32 -> BF16 and turns BF16 subnormals into other
values, and multiplies the bit patterns of BF16 in `tl.dot`; that of 3.6 rounds `tl.fma` twice and
needs NumPy below 2.4. `enable` tests each operation and replaces the wrong ones. It also spares
repeated preparation and types, most of the time of a kernel with small steps.
"""

import importlib.util
import os
import sys
import threading
from typing import Any

from rlk.errors import PlatformError

_VARIABLE = "TRITON_INTERPRET"
# The spellings that Triton reads as true.
_TRUE = ("1", "true", "on", "y", "yes")

_enabled = False
# Triton's interpreter keeps one grid, and one prepared language, for the process.
_launching = threading.RLock()


def enable() -> None:
    """Run Triton kernels of this process in the interpreter, with the GPU's rounding.

    Call it before anything imports Triton kernels: Triton decides when a kernel is decorated.

    Raises:
        PlatformError: Triton is missing, was already imported for compilation, or its interpreter
            fails the self-test after the corrections.
    """
    global _enabled
    if _enabled:
        return
    if importlib.util.find_spec("triton") is None:
        raise PlatformError("interpreter: triton must be installed, got none; install triton")
    decided = "triton.language" in sys.modules
    if not decided:
        os.environ[_VARIABLE] = "1"
    import triton
    import triton.language as tl

    if isinstance(tl.sum, triton.JITFunction):
        raise PlatformError(
            "interpreter: TRITON_INTERPRET must be 1 before triton is imported, got triton "
            "already imported for compilation; set it in the environment"
        )
    os.environ[_VARIABLE] = "1"
    from triton.runtime import interpreter as triton_interpreter

    _correct(triton_interpreter)
    _prepare_once(triton_interpreter)
    _derive_once(triton_interpreter)
    _enabled = True


def is_enabled() -> bool:
    """Whether Triton kernels run in the corrected interpreter.

    Applies the corrections when the environment asks for the interpreter by TRITON_INTERPRET=1.
    """
    if not _enabled and os.environ.get(_VARIABLE, "").lower() in _TRUE:
        enable()
    return _enabled


def enable_without_gpu() -> bool:
    """Enable the interpreter where Triton is installed and no GPU is there; true if enabled.

    An environment that sets TRITON_INTERPRET=1 enables it on a machine with a GPU too.
    """
    import torch

    if importlib.util.find_spec("triton") is None:
        return False
    if not torch.cuda.is_available():
        enable()
    return is_enabled()


def _correct(triton_interpreter: Any) -> None:
    """Replace the operations that fail the self-test; raise if one still fails."""
    builder = triton_interpreter.InterpreterBuilder
    if not _casts_are_right(triton_interpreter):
        builder.cast_impl = _cast(triton_interpreter, builder.cast_impl)
    if not _fma_is_right(triton_interpreter):
        builder.create_fma = _fma(triton_interpreter, builder.create_fma)
    if not _dot_is_right(triton_interpreter):
        builder.create_dot = _dot(triton_interpreter, builder.create_dot)
    for operation, right in (
        ("FP32 and BF16 casts", _casts_are_right(triton_interpreter)),
        ("fma", _fma_is_right(triton_interpreter)),
        ("dot", _dot_is_right(triton_interpreter)),
    ):
        if not right:
            import triton

            raise PlatformError(
                f"interpreter: {operation} must round to nearest even, got other values with "
                f"triton {triton.__version__}; use triton 3.6 to 3.9"
            )


def _prepare_once(triton_interpreter: Any) -> None:
    """Prepare the language once a launch for each module, not at every call between kernels.

    Launches run one at a time, and are silent about overflow and invalid operations, as on a GPU.
    """
    import numpy as np

    executor, function = triton_interpreter.GridExecutor, triton_interpreter.InterpretedFunction
    launch, call = executor.__call__, function.__call__
    prepared: set[int] = set()

    def quiet_launch(self: Any, *args: Any, **options: Any) -> Any:
        with _launching, np.errstate(all="ignore"):
            # The end of a launch undoes the preparation.
            prepared.clear()
            return launch(self, *args, **options)

    def prepared_call(self: Any, *args: Any, **options: Any) -> Any:
        module = id(self.fn.__globals__)
        if module in prepared:
            return self.rewrite()(*args, **options)
        prepared.add(module)
        return call(self, *args, **options)

    executor.__call__, function.__call__ = quiet_launch, prepared_call


def _derive_once(triton_interpreter: Any) -> None:
    """Work out what follows from a type once for each, not in every operation on numbers.

    Of pointers, more than the name of the type counts: they stay as they are.
    """
    from triton.language import core, semantic

    new_type, new_tensor = core.block_type.__init__, core.tensor.__init__
    numpy_dtype = triton_interpreter._get_np_dtype
    broadcast = semantic.TritonSemantic.broadcast_impl_value
    types: dict[tuple[Any, ...], dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    numpy_dtypes: dict[str, Any] = {}

    def is_number(scalar: Any) -> bool:
        return scalar.__class__ is core.dtype

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        if not is_number(element_ty):
            new_type(self, element_ty, shape)
            return
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key not in types:
            new_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if not is_number(type.scalar):
            new_tensor(self, handle, type)
            return
        if type.name not in tensors:
            new_tensor(self, handle, type)
            derived = ("numel", "shape", "dtype")
            tensors[type.name] = {name: vars(self)[name] for name in derived}
        vars(self).update(tensors[type.name], handle=handle, type=type)

    def numpy_dtype_once(type: Any) -> Any:
        if not is_number(type.scalar):
            return numpy_dtype(type)
        if type.name not in numpy_dtypes:
            numpy_dtypes[type.name] = numpy_dtype(type)
        return numpy_dtypes[type.name]

    def broadcast_if_needed(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape.values == right.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    triton_interpreter._get_np_dtype = numpy_dtype_once
    semantic.TritonSemantic.broadcast_impl_value = broadcast_if_needed


def _cast(triton_interpreter: Any, original: Any) -> Any:
    """`cast_impl` with FP32 -> BF16 rounded to nearest even and BF16 -> FP32 exact."""
    import numpy as np
    import triton.language as tl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.float32 and target == tl.bfloat16:
            bits = src.data.view(np.uint32)
            # 0x7FFF plus the last kept bit carries exactly when the value rounds up.
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
            # 0x7FFF: the NaN that GPUs return; rounding could carry a NaN into another value.
            data = np.where(np.isnan(src.data), 0x7FFF, rounded).astype(np.uint16)
            return triton_interpreter.TensorHandle(data, target)
        if source == tl.bfloat16 and target == tl.float32:
            data = (src.data.astype(np.uint32) << 16).view(np.float32)
            return triton_interpreter.TensorHandle(data, target)
        return original(self, src, dst_type)

    return cast_impl


def _fma(triton_interpreter: Any, original: Any) -> Any:
    """`create_fma` rounded once for FP32 and FP16."""
    import numpy as np

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.data.dtype not in (np.float32, np.float16):
            return original(self, x, y, z)
        a, b, c = (v.data.astype(np.float64) for v in (x, y, z))
        product = a * b  # exact
        total = product + c
        part = total - product
        error = (product - (total - part)) + (c - part)
        # Round to odd: the second rounding then sees which side of a tie the sum lies on.
        side = error * total
        bits = total.view(np.int64)
        bits = np.where(side > 0, bits | 1, np.where(side < 0, (bits - 1) | 1, bits))
        data = bits.view(np.float64).astype(z.data.dtype)
        return triton_interpreter.TensorHandle(data, z.dtype.scalar)

    return create_fma


def _dot(triton_interpreter: Any, original: Any) -> Any:
    """`create_dot` of floats as golden's chain: steps of 16 of K, each summed in FP64."""
    import numpy as np
    import triton.language as tl

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar == tl.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return handle.data.astype(np.float64)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.dtype.scalar not in (tl.float32, tl.bfloat16, tl.float16):
            return original(self, a, b, d, *options)
        left, right, acc = widened(a), widened(b), d.data
        for first in range(0, left.shape[-1], 16):
            # The products of an FP32 tensor are exact in FP64.
            total = np.zeros(acc.shape)
            for k in range(first, min(first + 16, left.shape[-1])):
                total = total + left[..., :, k, None] * right[..., k, None, :]
            acc = (total + acc).astype(acc.dtype)
        return triton_interpreter.TensorHandle(acc, d.dtype.scalar)

    return create_dot


def _casts_are_right(triton_interpreter: Any) -> bool:
    """Whether hand-computed casts between FP32 and BF16 come out."""
    import numpy as np
    import triton.language as tl

    builder, handle = triton_interpreter.InterpreterBuilder(), triton_interpreter.TensorHandle
    # Ties to even both ways, above and below a tie, carry into Inf, subnormals, signs.
    narrow = {
        0x3F808000: 0x3F80, 0x3F818000: 0x3F82, 0x3F808001: 0x3F81, 0x3F807FFF: 0x3F80,
        0x7F7FFFFF: 0x7F80, 0x00008001: 0x0001, 0x80018000: 0x8002, 0x80000000: 0x8000,
        0xFF800000: 0xFF80,
    }  # fmt: skip
    wide = np.array(list(narrow), dtype=np.uint32).view(np.float32)
    got = builder.create_fp_trunc(handle(wide, tl.float32), tl.bfloat16).data
    right = np.array_equal(got.view(np.uint16), np.array(list(narrow.values()), dtype=np.uint16))
    # Two NaNs that truncation or a carry would turn into Inf or -0.
    nans = np.array([0x7F800001, 0x7FFFFFFF], dtype=np.uint32).view(np.float32)
    kept = builder.create_fp_trunc(handle(nans, tl.float32), tl.bfloat16).data.view(np.uint16)
    right = right and bool(np.all((kept & 0x7FFF) > 0x7F80))
    every = np.arange(65536, dtype=np.uint16)
    back = builder.create_fp_ext(handle(every, tl.bfloat16), tl.float32).data.view(np.uint32)
    quiet = np.uint32(0x00400000)  # a processor may set this bit of a NaN
    same = back == every.astype(np.uint32) << 16
    nan = (every & 0x7FFF) > 0x7F80
    return right and bool(np.all(same | (nan & ((back | quiet) & 0x7FFFFFFF > 0x7F800000))))


def _fma_is_right(triton_interpreter: Any) -> bool:
    """Whether hand-computed FP32 fma results come out."""
    import numpy as np
    import triton.language as tl

    builder, handle = triton_interpreter.InterpreterBuilder(), triton_interpreter.TensorHandle
    step, inf = 2.0**-12, float("inf")
    cases = (
        # (1 + 2^-12)^2 - (1 + 2^-11) leaves 2^-24, which two roundings lose.
        (1 + step, 1 + step, -(1 + 2 * step), 2.0**-24),
        # 2^-70 below a tie: an FP64 sum shows a tie, and its even neighbour is the upper one.
        (step * (1 + 2.0**-23), step * (1 - 2.0**-23), 1 + 2.0**-23, 1 + 2.0**-23),
        (2.0**-75, 2.0**-75, 2.0**-149, 2.0**-148),
        (2.0**-75, 2.0**-75, 0.0, 0.0),
        (2.0**127, 2.0, -(2.0**127), 2.0**127),
        (2.0**127, 2.0, 1.0, inf),
        (-1.0, inf, 1.0, -inf),
        (-0.0, 1.0, -0.0, -0.0),
    )
    a, b, c, want = np.array(cases, dtype=np.float32).T.copy()
    with np.errstate(all="ignore"):
        got = builder.create_fma(*(handle(v, tl.float32) for v in (a, b, c))).data
    return np.array_equal(got.view(np.uint32), want.view(np.uint32))


def _dot_is_right(triton_interpreter: Any) -> bool:
    """Whether BF16 numbers are multiplied, and the accumulator is rounded after 16 of K."""
    import numpy as np
    import triton.language as tl

    builder, handle = triton_interpreter.InterpreterBuilder(), triton_interpreter.TensorHandle
    ones = np.full((1, 32), 0x3F80, dtype=np.uint16)
    # 16/16 is lost beside 2^24, twice.
    sixteenths = np.full((32, 1), 0x3D80, dtype=np.uint16)
    results = []
    for start in (0.0, 2.0**24):
        acc = handle(np.full((1, 1), start, dtype=np.float32), tl.float32)
        with np.errstate(all="ignore"):
            operands = handle(ones, tl.bfloat16), handle(sixteenths, tl.bfloat16)
            results.append(float(builder.create_dot(*operands, acc, None, 0).data[0, 0]))
    return results == [2.0, 2.0**24]
