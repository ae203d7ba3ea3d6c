# SPDX-License-Identifier: Apache-2.0
"""Chains over rows: rows without a gradient at the end of a batch change no bit of any gradient."""

import torch

from rlk.gates.candidate import Run
from rlk.gates.inputs import SAMPLE_LENGTHS, Fixture, fixture, judged_sizes
from rlk.gates.record import Record
from rlk.gates.verdict import Verdict

# Less than a step of 16 rows, what fills the last step, whole steps, and several blocks of rows.
APPENDED = (1, 5, 16, 33, 257)


def chain_records(verdict: Verdict) -> list[Record]:
    """Every gradient with finite rows of zero upstream gradient appended, against those without.

    Rows in front or in between would move others to another place in the chain.
    """
    case = verdict.case
    records = []
    for prefix, sizes in judged_sizes(case.operator, case.tier).items():
        rows = sum(SAMPLE_LENGTHS)
        batch = fixture(case.operator, case.dtype, rows=rows, sizes=sizes, seed=case.seed)
        base = verdict.candidate.run_fixture(batch)
        for count in APPENDED:
            records += _appended(verdict, batch, base, count, prefix)
    return records


def _appended(verdict: Verdict, batch: Fixture, base: Run, count: int, prefix: str) -> list[Record]:
    operator = verdict.case.operator
    with_rows = {t.name for t in operator.inputs if t.has_rows}
    longer = Fixture(
        {n: _longer(t, count) if n in with_rows else t for n, t in batch.inputs.items()},
        {n: _longer(t, count, 0.0) for n, t in batch.upstream.items()},
        batch.scalars,
    )
    run = verdict.candidate.run_fixture(longer)
    return [
        verdict.bits(
            name,
            run.tensors[name][: batch.rows] if declared.has_rows else run.tensors[name],
            base.tensors[name],
            config=f"{prefix}appended_{count}",
            pair="canonical",
            runs=(base, run),
        )
        for declared in operator.differentiable
        for name in (f"d{declared.name}",)
    ]


def _longer(tensor: torch.Tensor, count: int, factor: float = -0.5) -> torch.Tensor:
    """The rows, then `count` other finite ones."""
    more = tensor[torch.arange(count) % len(tensor)] * factor
    return torch.cat([tensor, more])
