# SPDX-License-Identifier: Apache-2.0
"""A report of `rlk gate`, counted."""

from collections import Counter

from rlk.gates.record import Report
from rlk.records.document import GateRow, GateSummary, origin


def summary(report: Report, command: str = "rlk gate") -> GateSummary:
    """How many records each judgment left, and by what sources.

    Args:
        report: of a run of `rlk gate`.
        command: what was run.
    Returns:
        The record to keep.
    """
    counts = Counter(
        (r.operator, r.bits_version, r.backend, r.judgment, r.status) for r in report.records
    )
    rows = [
        GateRow(
            operator=operator,
            bits_version=version,
            backend=backend,
            judgment=judgment,
            status=status,
            records=count,
        )
        for (operator, version, backend, judgment, status), count in counts.items()
    ]
    made = origin(report.environment, command)
    return GateSummary(
        origin=made,
        tier=report.tier,
        seed=report.seed,
        passed=report.passed,
        interrupted=report.status == "interrupted",
        rows=rows,
    )
