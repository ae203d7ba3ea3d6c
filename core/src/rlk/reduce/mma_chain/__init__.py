# SPDX-License-Identifier: Apache-2.0
"""Matrix products whose every element is one chain of MMA steps, the same for all tile shapes."""

from types import ModuleType

import torch

from rlk import backends
from rlk.arguments import dtype_name
from rlk.dispatch import AUTO, Primitive, choose
from rlk.errors import ArgumentError, BackendError, GradientError, one_of
from rlk.launch import start_golden
from rlk.reduce.mma_chain import golden

__all__ = ["BACKENDS", "backend_module", "product"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    initial: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The product of a and the transpose of b.

        c[m, n] = RN((initial[m, n] + a[m, 0] * b[n, 0] + ... + a[m, K-1] * b[n, K-1]) + bias[n])

    Args:
        a: [M, K], FP32, BF16 or FP16, any strides, without gradient; M may be 0.
        b: [N, K], of the dtype of a, any strides, without gradient.
        bias: [N], FP32, BF16 or FP16; nothing is added if None.
        initial: [M, N], FP32: where the chain starts; +0 if None. A product over all of K equals
            the product over K[cut:] that starts from the FP32 product over K[:cut], bit by bit,
            if cut is a multiple of 16 (of 32 for FP32 inputs).
        dtype: of the result, torch.float32 or that of a; that of a if None.
        backend: "cuda", "triton" or "golden"; None chooses by device.
    Returns:
        c: [M, N] of dtype. One rounding, at the end.
    Gradients: none.
    Order: one FP32 accumulator an element, K ascending. BF16 and FP16: one tensor-core step for 16
        of K. FP32: x = hi + lo, hi = RN(x) and lo = RN(x - hi) to the 11 significant bits of TF32;
        each 32 of K is a block that starts from +0: four steps of 8 add a_lo * b_hi, four add
        a_hi * b_lo, four add a_hi * b_hi; one FP32 addition then adds it to the accumulator. What
        is missing of the last step or block is zero in both operands. Then +0 is added, so that
        idle steps change no sign, and then the bias. Golden rounds each step or block once, which
        no tensor core does: its values are alike, its bits are not.
    Raises:
        ArgumentError: shape, dtype or device does not fit; the message names the argument.
        BackendError: the backend asked for cannot run here.
        GradientError: an argument wants a gradient, which the result would drop.
    """
    _check_operands(a, b)
    if bias is not None:
        _check_beside("bias", bias, "[N]", (b.shape[0],), a)
    if initial is not None:
        _check_beside("initial", initial, "[M, N]", (a.shape[0], b.shape[0]), a)
        if initial.dtype != torch.float32:
            raise _error("initial", "float32", dtype_name(initial.dtype))
    dtype = a.dtype if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, a.dtype):
        known = dtype_name(a.dtype)
        either = known if known == "float32" else f"float32 or {known} like a"
        raise _error("dtype", either, str(dtype).removeprefix("torch."))
    given = {"a": a, "b": b, "bias": bias, "initial": initial}
    _refuse_gradients(given)
    choice = choose(_STEPS, a.device, AUTO if backend is None else backend)
    if choice.module is golden:
        start_golden("mma_chain.product", golden.__file__)
    plain = [None if t is None else t.detach().resolve_neg() for t in given.values()]
    result: torch.Tensor = choice.module.product(*plain, dtype)
    return result


def _load_cuda() -> ModuleType:
    from rlk.reduce.mma_chain import kernel_cuda

    return kernel_cuda


def _load_triton() -> ModuleType:
    from rlk.reduce.mma_chain import kernel_triton

    return kernel_triton


_STEPS = Primitive(
    "mma_chain",
    (backends.cuda(_load_cuda), backends.triton(_load_triton), backends.golden(lambda: golden)),
)
BACKENDS = tuple(b.name for b in _STEPS.backends)


def backend_module(name: str) -> ModuleType:
    """The module of a backend, with its `product` of a chosen tile and its `candidates`.

    Args:
        name: "cuda" or "triton".
    Raises:
        BackendError: there is no backend of this name.
    """
    for row in _STEPS.backends:
        if row.name == name:
            return row.load()
    raise BackendError(f"mma_chain: backend must be {one_of(BACKENDS)}, got {name!r}")


def _check_operands(a: torch.Tensor, b: torch.Tensor) -> None:
    for name, tensor, shape in (("a", a, "[M, K]"), ("b", b, "[N, K]")):
        _check_dense(name, tensor)
        if tensor.dtype not in _DTYPES:
            raise _error(name, "float32, bfloat16 or float16", dtype_name(tensor.dtype))
        if tensor.dim() != 2:
            raise _error(name, shape, str(list(tensor.shape)))
    if b.dtype != a.dtype:
        raise _error("b", f"{dtype_name(a.dtype)} like a", dtype_name(b.dtype))
    if b.shape[1] != a.shape[1]:
        raise _error("b", f"[N, K] with K={a.shape[1]}", str(list(b.shape)))
    _check_device("b", b, a)


def _check_beside(
    name: str, tensor: torch.Tensor, symbols: str, shape: tuple[int, ...], a: torch.Tensor
) -> None:
    """Check bias or initial, whose sizes a and b fix."""
    _check_dense(name, tensor)
    if tensor.dtype not in _DTYPES:
        raise _error(name, "float32, bfloat16 or float16", dtype_name(tensor.dtype))
    if tuple(tensor.shape) != shape:
        sizes = " and ".join(
            f"{s}={n}" for s, n in zip(symbols[1:-1].split(", "), shape, strict=True)
        )
        raise _error(name, f"{symbols} with {sizes}", str(list(tensor.shape)))
    _check_device(name, tensor, a)


def _refuse_gradients(given: dict[str, torch.Tensor | None]) -> None:
    for name, tensor in given.items():
        if tensor is not None and torch.is_grad_enabled() and tensor.requires_grad:
            raise GradientError(
                f"mma_chain: {name} must be without gradient, got requires_grad=True; detach it"
            )


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise _error(name, "a tensor", type(tensor).__name__)
    if tensor.layout != torch.strided:
        raise _error(name, "a dense tensor", str(tensor.layout))
    if tensor.is_nested:
        raise _error(name, "a dense tensor", "a nested tensor")


def _check_device(name: str, tensor: torch.Tensor, a: torch.Tensor) -> None:
    if tensor.device != a.device:
        raise _error(name, f"on {a.device} like a", str(tensor.device))


def _error(name: str, requirement: str, actual: str) -> ArgumentError:
    return ArgumentError(f"mma_chain: {name} must be {requirement}, got {actual}")
