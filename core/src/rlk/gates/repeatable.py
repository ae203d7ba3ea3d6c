# SPDX-License-Identifier: Apache-2.0
"""The same call again: twice more in this process, once in a fresh one."""

import json
import subprocess
import sys
from functools import lru_cache

import msgspec

from rlk import registry
from rlk.arguments import dtype_name
from rlk.compare import digest
from rlk.gates.candidate import Candidate, Run
from rlk.gates.case import Case
from rlk.gates.inputs import SAMPLE_LENGTHS, Fixture, fixture, smallest_sizes
from rlk.gates.record import Record
from rlk.gates.verdict import Verdict, not_run
from rlk.operator import Operator

# Seconds; a fresh process imports torch and, on a GPU, compiles kernels.
FRESH_PROCESS_LIMIT = 600


def repeatable(verdict: Verdict) -> list[Record]:
    """Every output and gradient of three runs and one fresh process, raw bits."""
    case = verdict.case
    batch = _batch(case.operator, case.dtype, case.seed)
    first, second, third = (verdict.candidate.run_fixture(batch) for _ in range(3))
    records = []
    for config, again in (("second_run", second), ("third_run", third)):
        for name, tensor in again.tensors.items():
            records.append(
                verdict.bits(
                    name,
                    tensor,
                    first.tensors[name],
                    config=config,
                    pair="first_run",
                    runs=(first, again),
                )
            )
    return records + _fresh_records(verdict, first)


def digests(case: Case, candidate: Candidate) -> dict[str, str]:
    """The digest of every output and gradient of a case's fixture."""
    run = candidate.run_fixture(_batch(case.operator, case.dtype, case.seed))
    return {name: digest(tensor) for name, tensor in run.tensors.items()}


def _fresh_records(verdict: Verdict, first: Run) -> list[Record]:
    case = verdict.case
    if registry.discover()[0].get(case.operator.name) is not case.operator:
        reason = "a declaration that is not installed cannot be found by a fresh process"
        return [msgspec.structs.replace(not_run(case, reason), config="fresh_process")]
    found = _fresh_digests(case.operator.name, case.backend, case.seed)[case.dtype]
    records = []
    for name, tensor in first.tensors.items():
        same = found.get(name) == digest(tensor)
        faults = () if same else (f"{name} has another digest in a fresh process",)
        records.append(
            verdict.record(
                name,
                (*verdict.faults((first,), name), *faults),
                config="fresh_process",
                config_pair="first_run",
                shape=list(tensor.shape),
                dtype=dtype_name(tensor.dtype),
            )
        )
    return records


@lru_cache(maxsize=64)
def _fresh_digests(operator: str, backend: str, seed: int) -> dict[str, dict[str, str]]:
    command = [sys.executable, "-m", "rlk.gates.fresh_process", operator, backend, str(seed)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=FRESH_PROCESS_LIMIT, check=False
    )
    if done.returncode:
        raise RuntimeError(f"a fresh process for {operator} failed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def _batch(operator: Operator, dtype: str, seed: int) -> Fixture:
    return fixture(
        operator, dtype, rows=sum(SAMPLE_LENGTHS), sizes=smallest_sizes(operator), seed=seed
    )
