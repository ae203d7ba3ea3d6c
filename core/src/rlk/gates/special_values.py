# SPDX-License-Identifier: Apache-2.0
"""Values where arithmetic is easily lost: -0.0 parameters, NaN and infinite rows, no rows."""

import math
from dataclasses import replace

import torch

from rlk.arguments import dtype_name
from rlk.gates.accuracy import reference
from rlk.gates.candidate import Run
from rlk.gates.inputs import Fixture, fixture, smallest_sizes
from rlk.gates.record import Record
from rlk.gates.verdict import Verdict

ROWS = 9
# The row that turns bad, in the middle of the batch.
BAD_ROW = 4
# Stands for a parameter of -0.0 in the oracle: the products' signs without 0 * anything.
NEARLY_ZERO = -1e-200


def special_values(verdict: Verdict) -> list[Record]:
    """Signs from -0.0 parameters, isolation of bad rows, and the empty batch."""
    case = verdict.case
    batch = fixture(
        case.operator,
        case.dtype,
        rows=ROWS,
        sizes=smallest_sizes(case.operator),
        seed=case.seed,
    )
    records = _negative_zero(verdict, batch)
    for config, value in (("nan_row", math.nan), ("inf_row", math.inf), ("zero_row", 0.0)):
        records += _bad_row(verdict, batch, config, value)
    return records + _no_rows(verdict, batch)


def _negative_zero(verdict: Verdict, batch: Fixture) -> list[Record]:
    """The sign of every tensor that is a pure product, with all parameters at -0.0."""
    operator = verdict.case.operator
    parameters = [t.name for t in operator.parameters]
    if not parameters:
        return []
    zeros = {n: torch.full_like(batch.inputs[n], -0.0) for n in parameters}
    nearly = {n: batch.inputs[n].double().fill_(NEARLY_ZERO) for n in parameters}
    run = verdict.candidate.run_fixture(replace(batch, inputs={**batch.inputs, **zeros}))
    expected = reference(operator, replace(batch, inputs={**batch.inputs, **nearly}))
    # Sums may cancel to a zero of either sign; a product's sign is always defined.
    sums = {r.result for r in operator.reductions}
    records = []
    for name, tensor in run.tensors.items():
        if name in sums:
            continue
        wrong = int((torch.signbit(tensor.cpu()) != torch.signbit(expected[name])).sum())
        faults = (f"{wrong} of {tensor.numel()} signs are wrong",) if wrong else ()
        records.append(_record(verdict, name, tensor, run, "negative_zero_parameter", faults))
    return records


def _bad_row(verdict: Verdict, batch: Fixture, config: str, value: float) -> list[Record]:
    """All other rows keep their bits; the bad row is what IEEE arithmetic makes of it."""
    operator = verdict.case.operator
    rows = [t.name for t in operator.inputs if t.has_rows]
    spoiled = {n: batch.inputs[n].clone() for n in rows}
    for tensor in spoiled.values():
        tensor[BAD_ROW] = value
    bad = replace(batch, inputs={**batch.inputs, **spoiled})
    good_run = verdict.candidate.run_fixture(batch)
    bad_run = verdict.candidate.run_fixture(bad)
    keep = [r for r in range(ROWS) if r != BAD_ROW]
    parameters = {f"d{t.name}" for t in operator.parameters}
    expected = reference(operator, bad)
    records = []
    for name, tensor in bad_run.tensors.items():
        if name in parameters:
            actual, wanted = tensor.cpu().isnan(), expected[name].isnan()
            wrong = int((actual != wanted).sum())
            faults = (f"{wrong} columns are NaN or not against the oracle",) if wrong else ()
            records.append(_record(verdict, name, tensor, bad_run, config, faults))
            continue
        records.append(
            verdict.bits(
                name,
                tensor[keep],
                good_run.tensors[name][keep],
                config=f"{config}_neighbours",
                pair="finite",
                runs=(good_run, bad_run),
            )
        )
        actual, wanted = tensor[BAD_ROW].cpu(), expected[name][BAD_ROW]
        wrong = int((actual.isnan() != wanted.isnan()).sum())
        faults = (f"{wrong} elements of row {BAD_ROW} are NaN or not",) if wrong else ()
        records.append(_record(verdict, name, tensor[BAD_ROW], bad_run, config, faults))
    return records


def _no_rows(verdict: Verdict, batch: Fixture) -> list[Record]:
    """An empty batch gives empty rows and zero parameter gradients, without a launch."""
    operator = verdict.case.operator
    rows = {t.name for t in operator.inputs if t.has_rows}
    inputs = {n: t[:0] if n in rows else t for n, t in batch.inputs.items()}
    upstream = {n: t[:0] for n, t in batch.upstream.items()}
    run = verdict.candidate.run(inputs, upstream, batch.scalars)
    parameters = {f"d{t.name}" for t in operator.parameters}
    records = []
    for name, tensor in run.tensors.items():
        faults = [fault for tensor_name, fault in run.faults if tensor_name == name]
        if name in parameters and bool(tensor.cpu().view(torch.uint8).any()):
            faults.append(f"{name} of an empty batch is not +0")
        if name not in parameters and tensor.shape[0] != 0:
            faults.append(f"{name} has shape {list(tensor.shape)}")
        records.append(
            verdict.record(
                name,
                tuple(faults),
                config="no_rows",
                shape=list(tensor.shape),
                dtype=dtype_name(tensor.dtype),
            )
        )
    return records


def _record(
    verdict: Verdict,
    name: str,
    tensor: torch.Tensor,
    run: Run,
    config: str,
    faults: tuple[str, ...],
) -> Record:
    return verdict.record(
        name,
        (*verdict.faults((run,), name), *faults),
        config=config,
        shape=list(tensor.shape),
        dtype=dtype_name(tensor.dtype),
    )
