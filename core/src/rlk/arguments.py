# SPDX-License-Identifier: Apache-2.0
"""Checks of a call against its declaration, all with one form of message."""

import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch

from rlk.errors import ArgumentError
from rlk.operator import Operator, Scalar, Tensor

# Kernels count along the innermost axis in 32 bits.
_LONGEST_AXIS = 2**31 - 1
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max
_NAMES = {getattr(torch, n): n for n in ("float32", "bfloat16", "float16", "float64", "int64")}


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype, as declarations write it."""
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def check_tensors(operator: Operator, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
    """Hold input tensors against the declaration.

    Returns:
        The value of every shape symbol; "T" is the number of flattened rows.
    """
    sizes: dict[str, int] = {}
    first: dict[str, tuple[str, torch.Tensor]] = {}
    for declared, tensor in zip(operator.inputs, tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise _error(operator, declared.name, "a tensor", type(tensor).__name__)
        _check_dense(operator, declared.name, tensor)
        _check_dtype(operator, declared, tensor, first)
        _check_shape(operator, declared, tensor, sizes, first)
        anchor = operator.inputs[0].name
        if declared.name != anchor and tensor.device != first[anchor][1].device:
            where = f"on {first[anchor][1].device} like {anchor}"
            raise _error(operator, declared.name, where, str(tensor.device))
        if declared.gradient is None and tensor.requires_grad:
            raise _error(operator, declared.name, "without gradient", "requires_grad=True")
        first[declared.name] = (declared.name, tensor)
    _check_limits(operator, sizes)
    return sizes


def check_scalars(operator: Operator, scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Hold scalars against the declaration; aliases come back as what they stand for."""
    return {s.name: check_scalar(operator, s, scalars[s.name]) for s in operator.scalars}


def plain_floats(declared: Scalar) -> tuple[float, float]:
    """The least and the largest float that a scalar takes as it is; no float lies between if none.

    Others may still be what the declaration wants: `check_scalar` tells.
    """
    if declared.fixed or declared.choices or isinstance(declared.default, bool):
        return math.inf, -math.inf
    return max(declared.minimum, -_LARGEST_FLOAT32), _LARGEST_FLOAT32


def check_sizes(owner: str, **sizes: Any) -> None:
    """Refuse what is no length of a module's parameter, before torch would.

    Args:
        owner: the class that is constructed, for the message.
        sizes: by the names of its arguments.
    Raises:
        ArgumentError: one is no integer or below 1.
    """
    for name, size in sizes.items():
        whole = isinstance(size, Integral | torch.SymInt) and not isinstance(size, bool)
        if not whole or size < 1:
            raise ArgumentError(f"{owner}: {name} must be an integer of at least 1, got {size!r}")


def check_gradients(
    operator: Operator, gradients: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> None:
    """Hold the output gradients of a backward call against the outputs' declaration."""
    for declared, gradient in zip(operator.outputs, gradients, strict=True):
        _check_result(operator, declared, f"gradient of {declared.name}", gradient, tensors)


def check_saved(
    operator: Operator, saved: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> None:
    """Hold saved state, which hooks may have changed, against its declaration."""
    for declared, tensor in zip(operator.saved, saved, strict=True):
        _check_result(operator, declared, declared.name, tensor, tensors)


def _check_result(
    operator: Operator,
    declared: Tensor,
    name: str,
    tensor: torch.Tensor,
    tensors: Sequence[torch.Tensor],
) -> None:
    """Hold a tensor against the shape and dtype that these inputs give to a result."""
    _check_dense(operator, name, tensor)
    shape = output_shape(operator, declared, tensors)
    if tuple(tensor.shape) != shape:
        raise _error(operator, name, f"{list(shape)}", f"{list(tensor.shape)}")
    dtype = output_dtype(operator, declared, tensors)
    if tensor.dtype != dtype:
        raise _error(operator, name, dtype_name(dtype), dtype_name(tensor.dtype))
    if tensor.device != tensors[0].device:
        raise _error(operator, name, f"on {tensors[0].device}", str(tensor.device))


def _check_dense(operator: Operator, name: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided:
        raise _error(operator, name, "a dense tensor", str(tensor.layout))
    if tensor.is_nested:
        raise _error(operator, name, "a dense tensor", "a nested tensor")


def output_shape(
    operator: Operator, declared: Tensor, tensors: Sequence[torch.Tensor]
) -> tuple[int, ...]:
    """The shape of an output or saved tensor for these inputs."""
    sizes: dict[str, int] = {}
    leading: tuple[int, ...] = ()
    for known, tensor in zip(operator.inputs, tensors, strict=True):
        symbols = known.shape
        if known.has_rows:
            symbols = symbols[1:]
            leading = tuple(tensor.shape[: tensor.dim() - len(symbols)])
        sizes.update(zip(symbols, tensor.shape[tensor.dim() - len(symbols) :], strict=True))
    trailing = declared.shape[1:] if declared.has_rows else declared.shape
    return (leading if declared.has_rows else ()) + tuple(sizes[s] for s in trailing)


def output_dtype(
    operator: Operator, declared: Tensor, tensors: Sequence[torch.Tensor]
) -> torch.dtype:
    """The dtype of an output or saved tensor for these inputs."""
    (rule,) = declared.dtype
    if rule.startswith("="):
        return tensors[[t.name for t in operator.inputs].index(rule[1:])].dtype
    return getattr(torch, rule)


def _check_dtype(
    operator: Operator,
    declared: Tensor,
    tensor: torch.Tensor,
    first: Mapping[str, tuple[str, torch.Tensor]],
) -> None:
    accepted = []
    for rule in declared.dtype:
        if rule.startswith("="):
            source = first[rule[1:]][1].dtype
            if tensor.dtype == source:
                return
            accepted.append(f"{dtype_name(source)} like {rule[1:]}")
        elif dtype_name(tensor.dtype) == rule:
            return
        elif rule not in (a.split()[0] for a in accepted):
            accepted.append(rule)
    raise _error(operator, declared.name, " or ".join(accepted), dtype_name(tensor.dtype))


def _check_shape(
    operator: Operator,
    declared: Tensor,
    tensor: torch.Tensor,
    sizes: dict[str, int],
    first: Mapping[str, tuple[str, torch.Tensor]],
) -> None:
    symbols = declared.shape[1:] if declared.has_rows else declared.shape
    known = {s: sizes[s] for s in symbols if s in sizes}
    wanted = f"[{', '.join(declared.shape)}]"
    if known:
        wanted += " with " + ", ".join(f"{s}={v}" for s, v in known.items())
    leading = tensor.dim() - len(symbols)
    if leading < 0 or (leading > 0 and not declared.has_rows):
        raise _error(operator, declared.name, wanted, str(list(tensor.shape)))
    for symbol, size in zip(symbols, tensor.shape[leading:], strict=True):
        if sizes.setdefault(symbol, size) != size:
            raise _error(operator, declared.name, wanted, str(list(tensor.shape)))
    if not declared.has_rows:
        return
    sizes_of_a_row = zip(symbols, tensor.shape[leading:], strict=True)
    if 0 in [size for symbol, size in sizes_of_a_row if symbol != operator.token_axis]:
        raise _error(
            operator, declared.name, f"{wanted} with no empty row", str(list(tensor.shape))
        )
    for other in operator.inputs:
        if other.has_rows and other.name in first:
            like = first[other.name][1]
            axes = like.shape[: like.dim() - len(other.shape) + 1]
            if axes != tensor.shape[:leading]:
                row = (known.get(symbol, symbol) for symbol in symbols)
                fitting = f"[{', '.join(map(str, (*axes, *row)))}] like {other.name}"
                raise _error(operator, declared.name, fitting, str(list(tensor.shape)))
    # Not Size.numel: it would fix the row count of a dynamic graph.
    sizes.setdefault("T", math.prod(tensor.shape[:leading]))


def _check_limits(operator: Operator, sizes: Mapping[str, int]) -> None:
    for declared in operator.inputs:
        size = sizes.get(declared.shape[-1])
        # Symbolic sizes get no guard: an exported program would be bound by it.
        if type(size) is int and size > _LONGEST_AXIS:
            wanted = f"such that {declared.shape[-1]} < 2^31"
            raise _error(operator, declared.name, wanted, f"{declared.shape[-1]} = {size}")
    for limit in operator.limits:
        least = limit.factor * sizes[limit.symbol]
        if limit.exactly and sizes[limit.most] != least:
            declared = next(t for t in operator.inputs if limit.most in t.shape)
            wanted = f"[{', '.join(declared.shape)}] with {limit.most} = {limit.factor} * "
            wanted += f"{limit.symbol} = {least}"
            raise _error(operator, declared.name, wanted, f"{limit.most} = {sizes[limit.most]}")
        if least > sizes[limit.most]:
            name = next(t.name for t in operator.inputs if limit.symbol in t.shape)
            wanted = f"{limit.factor} * {limit.symbol} <= {limit.most} = {sizes[limit.most]}"
            got = f"{limit.symbol} = {sizes[limit.symbol]}"
            raise _error(operator, name, f"such that {wanted}", got)


def check_scalar(operator: Operator, declared: Scalar, value: Any) -> Any:
    """Hold one scalar against the declaration; an alias comes back as what it stands for."""
    if declared.fixed and value != declared.default:
        raise _error(operator, declared.name, repr(declared.default), repr(value))
    if isinstance(declared.default, bool):
        if not isinstance(value, bool):
            raise _error(operator, declared.name, "True or False", repr(value))
        return value
    if declared.choices:
        value = declared.aliases.get(value, value) if isinstance(value, str) else value
        if value not in declared.choices:
            names = ", ".join((*declared.choices, *declared.aliases))
            raise _error(operator, declared.name, f"one of {names}", repr(value))
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _error(operator, declared.name, "a number", repr(value))
    if not max(declared.minimum, -_LARGEST_FLOAT32) <= value <= _LARGEST_FLOAT32:
        wanted = "a finite float32"
        if declared.minimum > -_LARGEST_FLOAT32:
            wanted += f" of at least {declared.minimum}"
        raise _error(operator, declared.name, wanted, repr(value))
    return float(value)


def _error(operator: Operator, name: str, requirement: str, actual: str) -> ArgumentError:
    return ArgumentError(f"{operator.name}: {name} must be {requirement}, got {actual}")
