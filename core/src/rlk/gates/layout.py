# SPDX-License-Identifier: Apache-2.0
"""The same values in another layout: strides, offsets and aliasing must not show in the bits."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from rlk.arguments import dtype_name
from rlk.compare import same_bits
from rlk.gates.candidate import Run
from rlk.gates.inputs import Fixture, fixture, smallest_sizes
from rlk.gates.record import Record
from rlk.gates.verdict import Verdict
from rlk.operator import Operator

# 7: an odd row count, so that no stride is a multiple of a block.
ROWS = 7

Layout = Callable[[torch.Tensor], torch.Tensor]


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Every second element of a buffer twice as long."""
    buffer = tensor.new_empty(*tensor.shape[:-1], 2 * tensor.shape[-1])
    view = buffer[..., ::2]
    view.copy_(tensor)
    return view


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """First axis innermost."""
    if tensor.dim() < 2:
        return strided(tensor)
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def swapped(tensor: torch.Tensor) -> torch.Tensor:
    """First two axes in the other order in memory: no one stride describes both."""
    if tensor.dim() < 2:
        return strided(tensor)
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def narrow(tensor: torch.Tensor) -> torch.Tensor:
    """A slice of wider rows, as the gradient of `cat` arrives."""
    buffer = tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] + 5)
    view = buffer[..., 3 : 3 + tensor.shape[-1]]
    view.copy_(tensor)
    return view


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, but one element off any alignment."""
    buffer = tensor.new_empty(tensor.numel() + 1)
    view = buffer[1:].view(tensor.shape)
    view.copy_(tensor)
    return view


LAYOUTS: dict[str, Layout] = {
    "strided": strided,
    "transposed": transposed,
    "narrow": narrow,
    "misaligned": misaligned,
}


def layout(verdict: Verdict) -> list[Record]:
    """Inputs and upstream gradients in every layout against their contiguous copies."""
    case = verdict.case
    batch = fixture(
        case.operator,
        case.dtype,
        rows=ROWS * len(case.operator.row_axes),
        sizes=smallest_sizes(case.operator),
        seed=case.seed,
    )
    layouts = LAYOUTS
    if len(case.operator.row_axes) > 1:
        batch = _in_samples(case.operator, batch)
    if len(case.operator.row_axes) > 1 or case.operator.token_axis:
        # Strides of samples and of tokens are two.
        layouts = {**LAYOUTS, "swapped": swapped}
    expected = verdict.candidate.run_fixture(batch)
    records = []
    for name, rearrange in layouts.items():
        inputs = _rearranged(batch.inputs, rearrange)
        moved = Fixture(inputs, batch.upstream, batch.scalars)
        records += _compare(verdict, moved, expected, f"{name}_inputs")
        upstream = _rearranged(batch.upstream, rearrange)
        moved = Fixture(batch.inputs, upstream, batch.scalars)
        records += _compare(verdict, moved, expected, f"{name}_gradient")
    records += _expanded(verdict, batch)
    return records + _ownership(verdict, batch)


def _in_samples(operator: Operator, batch: Fixture) -> Fixture:
    """The rows of a batch as samples of ROWS."""
    rows = {t.name for t in operator.inputs if t.has_rows}
    return replace(
        batch,
        inputs={n: t.unflatten(0, (-1, ROWS)) if n in rows else t for n, t in batch.inputs.items()},
        upstream={n: t.unflatten(0, (-1, ROWS)) for n, t in batch.upstream.items()},
    )


def _rearranged(tensors: Mapping[str, torch.Tensor], rearrange: Layout) -> dict[str, torch.Tensor]:
    return {name: rearrange(tensor) for name, tensor in tensors.items()}


def _compare(verdict: Verdict, moved: Fixture, expected: Run, config: str) -> list[Record]:
    run = verdict.candidate.run_fixture(moved)
    return [
        verdict.bits(
            name,
            tensor,
            expected.tensors[name],
            config=config,
            pair="contiguous",
            runs=(expected, run),
        )
        for name, tensor in run.tensors.items()
    ]


def _expanded(verdict: Verdict, batch: Fixture) -> list[Record]:
    # Stride 0: one row for all, and one number for all as the gradient of `sum` arrives.
    rows = {t.name for t in verdict.case.operator.inputs if t.has_rows}
    first = {n: t[:1].expand_as(t) if n in rows else t for n, t in batch.inputs.items()}
    one = {n: t[:1, ..., :1].expand_as(t) for n, t in batch.upstream.items()}
    expanded = Fixture(first, one, batch.scalars)
    copied = Fixture(
        {n: t.contiguous() for n, t in first.items()},
        {n: t.contiguous() for n, t in one.items()},
        batch.scalars,
    )
    return _compare(verdict, expanded, verdict.candidate.run_fixture(copied), "expanded")


def _ownership(verdict: Verdict, batch: Fixture) -> list[Record]:
    """Results are contiguous and own their storage, also for one row; inputs are not written."""
    operator = verdict.case.operator
    with_rows = {t.name for t in operator.inputs if t.has_rows}
    records = []
    if len(operator.row_axes) > 1:
        # Of one sample, so that one row is one token.
        batch = replace(
            batch,
            inputs={n: t[0] if n in with_rows else t for n, t in batch.inputs.items()},
            upstream={n: t[0] for n, t in batch.upstream.items()},
        )
    for config, rows in (("one_row", 1), ("all_rows", ROWS)):
        inputs = {n: t[:rows] if n in with_rows else t for n, t in batch.inputs.items()}
        upstream = {n: t[:rows] for n, t in batch.upstream.items()}
        part = replace(batch, inputs=inputs, upstream=upstream)
        run = verdict.candidate.run_fixture(part)
        returned = {**run.tensors, **verdict.candidate.finished_gradients(part)}
        for name, tensor in returned.items():
            faults = _not_owned(name, tensor, run)
            records.append(_owned(verdict, name, tensor, config, run, faults))
        before = {**inputs, **{f"d{n}": t for n, t in upstream.items()}}
        for name, tensor in run.given.items():
            written = not same_bits(tensor, before[name])
            faults = (f"{name} was written into",) if written else ()
            records.append(_owned(verdict, name, tensor, config, run, faults))
    return records


def _not_owned(name: str, tensor: torch.Tensor, run: Run) -> tuple[str, ...]:
    """What is wrong with a result as the backend returned it and as autograd gave it out."""
    differentiated = run.tensors[name]
    storage = differentiated.untyped_storage().data_ptr()
    faults = [
        f"{name} shares the storage of {other}"
        for other, source in run.given.items()
        if source.untyped_storage().data_ptr() == storage
    ]
    if tensor.dtype != differentiated.dtype:
        faults.append(f"the backend returns {name} in {dtype_name(tensor.dtype)}")
    elif not same_bits(tensor, differentiated):
        faults.append(f"{name} asked for alone has other bits than with the other gradients")
    if not tensor.is_contiguous():
        faults.append(f"{name} is not contiguous: strides {tensor.stride()}")
    return tuple(faults)


def _owned(
    verdict: Verdict,
    name: str,
    tensor: torch.Tensor,
    config: str,
    run: Run,
    faults: tuple[str, ...],
) -> Record:
    return verdict.record(
        name,
        (*verdict.faults((run,), name), *faults),
        config=f"ownership_{config}",
        shape=list(tensor.shape),
        dtype=dtype_name(tensor.dtype),
    )
