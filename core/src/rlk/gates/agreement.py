# SPDX-License-Identifier: Apache-2.0
"""Bytes against golden: computed here, or recorded as hashes and compared anywhere.

Tensors whose bits are claimed to be equal among some backends only are compared between these, on
one device.
"""

from collections.abc import Iterator

import msgspec
import torch

from rlk import dispatch
from rlk.arguments import dtype_name
from rlk.compare import digest
from rlk.errors import BackendError
from rlk.execution import Execution
from rlk.gates import golden_hashes
from rlk.gates.candidate import Candidate, Run
from rlk.gates.inputs import (
    SHORT_ELEMENTS,
    VALUES,
    Fixture,
    edge_sizes,
    fixture,
    label,
    row_elements,
    scalar_variants,
    smallest_sizes,
)
from rlk.gates.record import Record
from rlk.gates.verdict import Verdict, not_run
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
    case = verdict.case
    if case.backend == "golden":
        return against_hashes(verdict)
    execution = Execution(case.operator)
    golden = Candidate(execution, "golden", torch.device("cpu"))
    peers, records = _peers(verdict)
    for config, batch in agreement_inputs(case.operator, case.dtype, case.tier):
        actual = verdict.candidate.run_fixture(batch)
        equal = [n for n in actual.tensors if not case.operator.equal_among(n)]
        if equal:
            expected = golden.run_fixture(batch)
            records += _against(verdict, equal, actual, expected, "golden", config)
        for name in peers:
            peer = Candidate(execution, name, case.device).run_fixture(batch)
            equal = [n for n in actual.tensors if name in case.operator.equal_among(n)]
            records += _against(verdict, equal, actual, peer, name, config)
    return records


def _peers(verdict: Verdict) -> tuple[list[str], list[Record]]:
    """Other backends whose bits are claimed to be equal, and those of them that cannot run here."""
    case = verdict.case
    among = [c.among for c in case.operator.claims if case.backend in c.among]
    named = dict.fromkeys(name for names in among for name in names if name != case.backend)
    peers, records = [], []
    for name in named:
        try:
            dispatch.choose(case.operator, case.device, name)
            peers.append(name)
        except (BackendError, ImportError) as error:
            skipped = not_run(case, f"nothing to compare with: {error}")
            records.append(msgspec.structs.replace(skipped, config_pair=name))
    return peers, records


def _against(
    verdict: Verdict, names: list[str], actual: Run, expected: Run, pair: str, config: str
) -> list[Record]:
    ran = {launch.backend for launch in expected.launches}
    faults = () if ran <= {pair} else (f"{pair} was to run, ran {', '.join(sorted(ran))}",)
    return [
        verdict.bits(
            name,
            actual.tensors[name].cpu(),
            expected.tensors[name].cpu(),
            config=config,
            pair=pair,
            runs=(actual,),
            faults=faults,
            nan_alone=True,
        )
        for name in names
    ]


def against_hashes(verdict: Verdict) -> list[Record]:
    """Outputs and gradients on fixed inputs against the operator's recorded golden hashes."""
    case = verdict.case
    recorded = golden_hashes.load(case.operator)
    problem = golden_hashes.version_fault(case.operator, recorded)
    records = []
    for config, batch in golden_hashes.inputs(case.operator, case.dtype):
        run = verdict.candidate.run_fixture(batch)
        for name, tensor in run.tensors.items():
            if case.backend != "golden" and case.operator.equal_among(name):
                continue
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
    edges = edge_sizes(operator, lengths)
    if tier == "short":
        edges = [sizes for sizes in edges if row_elements(operator, sizes) <= SHORT_ELEMENTS]
    for sizes in [real, *edges]:
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
