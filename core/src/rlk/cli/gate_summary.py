# SPDX-License-Identifier: Apache-2.0
"""What a gate run says at its end: failures one by one, then one table."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.table import Table

from rlk.cli.console import table
from rlk.gates import Record, Report

_COLUMNS = (
    "operator", "backend", "judgment", "comparisons", "passed", "failed", "not run", "reason",
)  # fmt: skip


def failures(records: Sequence[Record]) -> Iterator[str]:
    """Every failed record with its first mismatch, then the command that repeats its case."""
    failed = [record for record in records if record.status == "failed"]
    for repro, group in groupby(failed, key=lambda record: record.repro):
        for record in group:
            pair = f" against {record.config_pair}" if record.config_pair else ""
            where = f", {record.config}{pair}" if record.config else ""
            yield (
                f"FAILED {record.operator} {record.backend} {record.judgment}: {record.tensor} "
                f"{record.dtype} {record.shape}{where}"
            )
            reason = record.reason or "no reason recorded"
            yield f"  {reason}"
            first = record.first_mismatch
            if first is not None and first.actual not in reason:
                yield f"  first at {first.index}: {first.actual} instead of {first.expected}"
        yield f"  repeat: {repro}"


def judgments(records: Sequence[Record]) -> Table:
    """Counts by operator, backend and judgment; reasons of what was not run."""
    cells: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        key = (record.operator, record.backend, record.judgment)
        cells.setdefault(key, []).append(record)
    return table("", _COLUMNS, [(*key, *_counts(cell)) for key, cell in cells.items()])


def conclusion(report: Report) -> str:
    """One line: the status, and what it rests on."""
    comparisons, passed, failed, not_run, _ = _counts(report.records)
    if judged_nothing(report):
        return f"nothing could be judged: {not_run} not run"
    # A record is one comparison or many.
    many = "" if comparisons == passed + failed else f"{comparisons} comparisons, "
    return f"{report.status}: {many}{passed} records passed, {failed} failed, {not_run} not run"


def judged_nothing(report: Report) -> bool:
    """Whether all that was asked for is what this machine cannot judge."""
    over = report.status != "interrupted"
    return over and all(record.status == "not_run" for record in report.records)


def _counts(records: Sequence[Record]) -> tuple[int, int, int, int, str]:
    status = [record.status for record in records]
    reasons = dict.fromkeys(r.reason or "" for r in records if r.status == "not_run")
    return (
        sum(record.comparisons for record in records),
        status.count("passed"),
        status.count("failed"),
        status.count("not_run"),
        "; ".join(reasons),
    )
