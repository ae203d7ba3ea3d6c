# SPDX-License-Identifier: Apache-2.0
"""What a gate leaves behind: one record per judged comparison, and the report of a run."""

from typing import Any, Literal

import msgspec

SCHEMA = "rlk.gate-report/1"

Judgment = Literal[
    "forward_accuracy",
    "gradient_accuracy",
    "forward_invariance",
    "gradient_invariance",
    "repeatable",
    "order_free",
    "backend_equal",
    "gpu_to_gpu",
    "layout",
    "special_values",
    "mma_schedule",
    "rollout_equal",
]
Status = Literal["passed", "failed", "not_run"]


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """The lowest-index element that differs."""

    index: list[int]
    actual: str
    expected: str
    count: int


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Which code ran, as the code itself reported, against what was asked for."""

    requested: str
    actual: list[str]
    kernels: list[str]
    binaries: list[str]
    device: str
    weights: str


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One judgment of one tensor in one configuration."""

    operator: str
    bits_version: int
    backend: str
    judgment: Judgment
    status: Status
    reason: str | None
    tensor: str
    config: str
    config_pair: str | None
    shape: list[int]
    dtype: str
    max_abs_error: float | None
    mean_abs_error: float | None
    ulp_histogram: dict[str, int]
    correctly_rounded: float | None
    atol: float | None
    rtol: float | None
    comparisons: int
    first_mismatch: Mismatch | None
    repro: str
    provenance: Provenance


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest that a run was held against."""

    workload_id: str
    model_id: str
    revision: str
    manifest_sha256: str


class Report(msgspec.Struct, kw_only=True):
    """A run: its records, and the environment they were made in."""

    schema: str
    status: Literal["passed", "failed", "interrupted"]
    passed: bool
    tier: str
    seed: int
    environment: dict[str, Any]
    workload: Workload | None
    records: list[Record]


def summarise(
    records: list[Record],
    *,
    tier: str,
    seed: int,
    environment: dict[str, Any],
    workload: Workload | None = None,
    interrupted: bool = False,
) -> Report:
    """The report of these records; it passes only if something was judged and nothing failed."""
    judged = [r for r in records if r.status != "not_run"]
    green = bool(judged) and all(r.status == "passed" for r in judged) and not interrupted
    status: Any = "interrupted" if interrupted else "passed" if green else "failed"
    return Report(
        schema=SCHEMA,
        status=status,
        passed=green,
        tier=tier,
        seed=seed,
        environment=environment,
        workload=workload,
        records=records,
    )
