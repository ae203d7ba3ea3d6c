# SPDX-License-Identifier: Apache-2.0
"""`rlk check`: one accuracy run of the function that users call, on a shape of one's own."""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Annotated, Any

import torch
import typer

from rlk import dispatch
from rlk.arguments import dtype_name
from rlk.cli import select
from rlk.cli.console import console, table
from rlk.cli.public_run import Results, run
from rlk.errors import RlkError
from rlk.gates.accuracy import Accuracy, judge_tensor, reference
from rlk.gates.case import DEFAULT_SEED
from rlk.gates.inputs import (
    SAMPLE_LENGTHS,
    Fixture,
    fixture,
    smallest_sizes,
    smallest_workload,
)
from rlk.operator import Operator

_COLUMNS = (
    "tensor", "dtype", "shape", "within contract", "max abs error", "ulp at RMS", "bound",
    "correctly rounded", "bound", "verdict",
)  # fmt: skip

# 32 GiB for each FP64 tensor of the oracle; enough to overflow a 32-bit index.
_MAX_ELEMENTS = 2**32


def check(
    operator: Annotated[str, typer.Argument(metavar="OP", help="Name of the operator.")],
    backend: Annotated[str, typer.Option(help="Backend to run.")] = dispatch.AUTO,
    device: Annotated[str | None, typer.Option(help="Device: cpu, cuda, cuda:1.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the first input.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="Shape of the first input, such as 4,16,2048.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=select.MAX_SEED, help="Seed of the inputs.")
    ] = DEFAULT_SEED,
    grad: Annotated[bool, typer.Option(help="Judge the gradients too.")] = True,
) -> None:
    """Hold one run against the FP64 oracle; exit status 0 within the contract, 1 outside."""
    (declared,) = select.named([operator])
    place = _device(device)
    chosen = select.backend_for(declared, place, backend)
    with _memory(shape):
        batch, arguments = _inputs(declared, dtype, shape, seed)
        results = run(declared, batch, place, backend, arguments, grad=grad)
        judged = _judge(declared, batch, results)
    faults = [f"{name}: {fault}" for name, found in judged.items() for fault in found.faults]
    if results.backends != {chosen}:
        ran = ", ".join(sorted(results.backends)) or "nothing"
        faults.append(f"backend {chosen} was chosen, ran {ran}")
    _print(declared, batch, results, judged, place, seed)
    for fault in faults:
        console().print(fault, soft_wrap=True)
    within, total = (sum(getattr(f, part) for f in judged.values()) for part in ("within", "total"))
    rate = f"{100 * within / total:.4f} % of {total} elements within the contract"
    console().print(f"{'failed' if faults else 'passed'}: {rate}")
    raise typer.Exit(1 if faults else 0)


@contextmanager
def _memory(shape: str | None) -> Iterator[None]:
    """Where an allocation that fails is the fault of the shape asked for."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # On the CPU, torch raises a plain RuntimeError.
        exhausted = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not exhausted and "allocate memory" not in str(error):
            raise
        raise RlkError(f"check: --shape must fit into memory, got {shape!r}") from error


def _judge(operator: Operator, batch: Fixture, results: Results) -> dict[str, Accuracy]:
    expected = reference(operator, batch)
    return {
        name: judge_tensor(operator, name, tensor, expected[name])
        for name, tensor in results.tensors.items()
    }


def _print(
    operator: Operator,
    batch: Fixture,
    results: Results,
    judged: dict[str, Accuracy],
    device: torch.device,
    seed: int,
) -> None:
    first = operator.inputs[0].name
    ran = ", ".join(sorted(results.backends)) or "nothing"
    rows = []
    for name, found in judged.items():
        tensor = results.tensors[name]
        rows.append(
            (
                name,
                dtype_name(tensor.dtype),
                list(tensor.shape),
                f"{100 * found.within / found.total:.4f} %",
                f"{found.max_abs_error:.3g}",
                f"{found.max_ulp_at_rms:.3g}",
                f"{found.bound.max_ulp_at_rms:g}",
                f"{100 * found.correctly_rounded:.4f} %",
                f"{100 * found.bound.correctly_rounded:g} %",
                "failed" if found.faults else "passed",
            )
        )
    shape = list(batch.inputs[first].shape)
    out = console()
    out.print(f"{operator.name}, backend {ran}, device {device}, {first} {shape}, seed {seed}")
    out.print(table("", _COLUMNS, rows))


def _device(name: str | None) -> torch.device:
    """The device of this name, or the GPU where there is one."""
    if name is None:
        return select.devices()[-1]
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RlkError(f"check: --device must be cpu, cuda or cuda:N, got {name!r}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise RlkError(f"check: --device must be present, got {name!r} with {count} GPUs here")
    return device


def _inputs(
    operator: Operator, dtype: str | None, shape: str | None, seed: int
) -> tuple[Fixture, Mapping[str, Any]]:
    """Inputs and upstream gradients, with the leading axes that `shape` asks for.

    Beside them what the function must be told at these sizes.
    """
    first = operator.inputs[0]
    if dtype not in (None, *first.dtype):
        raise RlkError(f"check: --dtype must be one of {', '.join(first.dtype)}, got {dtype!r}")
    sizes, arguments = smallest_sizes(operator), smallest_workload(operator).arguments
    leading = [sum(SAMPLE_LENGTHS)]
    if shape is not None:
        symbols = first.shape[1:] if first.has_rows else first.shape
        axes = _axes(shape, f"[{', '.join(first.shape)}]", symbols, first.has_rows)
        leading = axes[: len(axes) - len(symbols)]
        given = dict(zip(symbols, axes[len(leading) :], strict=True))
        others = _following(operator, {**sizes, **given}, given)
        sizes |= {**given, **others}
        # What a model says of its own sizes does not hold for others.
        arguments = {} if others else arguments
    for symbol, least in operator.too_small(sizes).items():
        raise RlkError(
            f"check: {symbol} must be at least {least} for values to tell a right kernel "
            f"from a wrong one, got {sizes[symbol]}; rlk gate compares its bits there"
        )
    rows = prod(leading)
    batch = fixture(operator, dtype or first.dtype[0], rows=rows, sizes=sizes, seed=seed)
    with_rows = {t.name for t in operator.inputs + operator.outputs if t.has_rows}

    def shaped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: t.reshape(*leading, *t.shape[1:]) if name in with_rows else t
            for name, t in tensors.items()
        }

    batch = replace(batch, inputs=shaped(batch.inputs), upstream=shaped(batch.upstream))
    return batch, arguments


def _following(
    operator: Operator, sizes: Mapping[str, int], given: Collection[str]
) -> dict[str, int]:
    """The sizes that must change for those given to fulfil the operator's limits."""
    found = {}
    for limit in operator.limits:
        least, most = limit.factor * sizes[limit.symbol], sizes[limit.most]
        if limit.exactly and least != most and limit.most not in given:
            found[limit.most] = least
        elif least > most and limit.symbol not in given:
            found[limit.symbol] = most // limit.factor
    return found


def _axes(shape: str, wanted: str, symbols: tuple[str, ...], has_rows: bool) -> list[int]:
    """The sizes written in `shape`, as many as the declaration wants."""
    parts = re.split("[,x]", shape.strip("[]() "))
    error = RlkError(f"check: --shape must be positive integers for {wanted}, got {shape!r}")
    if not all(re.fullmatch(r"\s*0*[1-9][0-9]{0,18}\s*", part) for part in parts):
        raise error
    if len(parts) < len(symbols) or (len(parts) > len(symbols) and not has_rows):
        raise error
    axes = [int(part) for part in parts]
    if prod(axes) > _MAX_ELEMENTS:
        raise RlkError(f"check: --shape must be of at most 2**32 elements, got {shape!r}")
    return axes
