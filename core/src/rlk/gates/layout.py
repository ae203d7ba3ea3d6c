# SPDX-License-Identifier: Apache-2.0
"""The same values in another layout: strides, offsets and aliasing must not show in the bits."""

from collections.abc import Callable, Mapping

import torch

from rlk.compare import same_bits
from rlk.gates.candidate import Run
from rlk.gates.inputs import Fixture, fixture, smallest_sizes
from rlk.gates.record import Record
from rlk.gates.verdict import Verdict

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
        rows=ROWS,
        sizes=smallest_sizes(case.operator),
        seed=case.seed,
    )
    expected = verdict.candidate.run_fixture(batch)
    records = []
    for name, rearrange in LAYOUTS.items():
        inputs = _rearranged(batch.inputs, rearrange)
        moved = Fixture(inputs, batch.upstream, batch.scalars)
        records += _compare(verdict, moved, expected, f"{name}_inputs")
        upstream = _rearranged(batch.upstream, rearrange)
        moved = Fixture(batch.inputs, upstream, batch.scalars)
        records += _compare(verdict, moved, expected, f"{name}_gradient")
    records += _expanded(verdict, batch)
    return records + _ownership(verdict, batch)


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
    """Outputs are contiguous and own their storage, also for one row; inputs are not written."""
    records = []
    for config, rows in (("one_row", 1), ("all_rows", ROWS)):
        part = Fixture(
            {n: t[:rows].clone() if t.shape[0] == ROWS else t.clone()
             for n, t in batch.inputs.items()},
            {n: t[:rows].clone() for n, t in batch.upstream.items()},
            batch.scalars,
        )  # fmt: skip
        given = {**part.inputs, **{f"d{n}": t for n, t in part.upstream.items()}}
        given = {n: t.to(verdict.candidate.device) for n, t in given.items()}
        before = {n: t.clone() for n, t in given.items()}
        run = verdict.candidate.run(
            {n: given[n] for n in part.inputs},
            {n: given[f"d{n}"] for n in part.upstream},
            part.scalars,
        )
        written = [n for n in given if not same_bits(given[n], before[n])]
        for name, tensor in run.tensors.items():
            records.append(_owned(verdict, name, tensor, given, written, config, run))
    return records


def _owned(
    verdict: Verdict,
    name: str,
    tensor: torch.Tensor,
    given: Mapping[str, torch.Tensor],
    written: list[str],
    config: str,
    run: Run,
) -> Record:
    storage = tensor.untyped_storage().data_ptr()
    faults = [f"{other} was written into" for other in written]
    faults += [
        f"{name} shares the storage of {other}"
        for other, source in given.items()
        if source.untyped_storage().data_ptr() == storage
    ]
    if not tensor.is_contiguous():
        faults.append(f"{name} is not contiguous: strides {tensor.stride()}")
    return verdict.record(
        name,
        (*verdict.faults((run,)), *faults),
        config=f"ownership_{config}",
        shape=list(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
    )
