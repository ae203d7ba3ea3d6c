# SPDX-License-Identifier: Apache-2.0
"""Bytes against golden: computed here, or recorded as hashes and compared anywhere."""

from collections.abc import Iterator

import torch

from rlk.arguments import dtype_name
from rlk.compare import digest
from rlk.execution import Execution
from rlk.gates import golden_hashes
from rlk.gates.candidate import Candidate
from rlk.gates.inputs import (
    VALUES,
    Fixture,
    edge_sizes,
    fixture,
    label,
    scalar_variants,
    smallest_sizes,
)
from rlk.gates.record import Record
from rlk.gates.verdict import Verdict
from rlk.operator import Operator

# Row lengths off every block size, and row counts around a program's constant.
SHORT_LENGTHS = (1, 3, 129, 257)
FULL_LENGTHS = (1, 3, 127, 128, 129, 256, 1000, 2048, 2049, 5120)
SHORT_ROWS = (1, 33)
# 2049: one above what a block of 256 threads holds; judged alone, as it takes its time.
LONG_LENGTH = 2049
FULL_ROWS = (1, 7, 33)


def backend_equal(verdict: Verdict) -> list[Record]:
    """A backend against golden on the same inputs; golden against its recorded hashes."""
    if verdict.case.backend == "golden":
        return against_hashes(verdict)
    operator = verdict.case.operator
    golden = Candidate(Execution(operator), "golden", torch.device("cpu"))
    records = []
    for config, batch in agreement_inputs(operator, verdict.case.dtype, verdict.case.tier):
        actual = verdict.candidate.run_fixture(batch)
        expected = golden.run_fixture(batch)
        records += [
            verdict.bits(
                name,
                tensor.cpu(),
                expected.tensors[name],
                config=config,
                pair="golden",
                runs=(actual,),
                nan_alone=True,
            )
            for name, tensor in actual.tensors.items()
        ]
    return records


def against_hashes(verdict: Verdict) -> list[Record]:
    """Outputs and gradients on fixed inputs against the operator's recorded golden hashes."""
    case = verdict.case
    recorded = golden_hashes.load(case.operator)
    problem = golden_hashes.version_fault(case.operator, recorded)
    records = []
    for config, batch in golden_hashes.inputs(case.operator, case.dtype):
        run = verdict.candidate.run_fixture(batch)
        for name, tensor in run.tensors.items():
            key = f"{case.dtype}/{config}/{name}"
            faults = [problem] if problem else []
            if recorded.hashes.get(key) != digest(tensor):
                faults.append(
                    f"{key} does not match the hash recorded for bits version "
                    f"{recorded.bits_version}"
                )
            records.append(
                verdict.record(
                    name,
                    (*verdict.faults((run,), name), *faults),
                    config=config,
                    config_pair="recorded_hash",
                    shape=list(tensor.shape),
                    dtype=dtype_name(tensor.dtype),
                )
            )
    return records


def agreement_inputs(
    operator: Operator, dtype: str, tier: str, seed: int = 0
) -> Iterator[tuple[str, Fixture]]:
    """Shapes, values and scalars over which backends must agree."""
    lengths = FULL_LENGTHS if tier == "full" else SHORT_LENGTHS
    counts = FULL_ROWS if tier == "full" else SHORT_ROWS
    real = smallest_sizes(operator)
    for sizes in [real, *edge_sizes(operator, lengths)]:
        for rows in counts:
            for kind, values in VALUES.items():
                batch = fixture(operator, dtype, rows=rows, sizes=sizes, seed=seed, values=values)
                yield f"{label(sizes)}_rows={rows}_{kind}", batch
    if len(real) == 1:
        sizes = dict.fromkeys(real, LONG_LENGTH)
        batch = fixture(operator, dtype, rows=3, sizes=sizes, seed=seed)
        yield f"{label(sizes)}_rows=3", batch
    for name, scalars in scalar_variants(operator).items():
        batch = fixture(operator, dtype, rows=7, sizes=real, seed=seed, scalars=scalars)
        yield f"{name}_{label(real)}_rows=7", batch
    if any("float32" in t.dtype for t in operator.parameters):
        batch = fixture(operator, dtype, rows=7, sizes=real, seed=seed, parameter_dtype="float32")
        yield f"float32_parameters_{label(real)}_rows=7", batch
