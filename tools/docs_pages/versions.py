# SPDX-License-Identifier: Apache-2.0
"""What became of changes to kernels, and the limits of times that are missed."""

import re
from collections.abc import Iterator, Mapping, Sequence

import bench_limits

from docs_pages.claims import NOT_RUN
from docs_pages.evidence import Evidence
from docs_pages.measured import folded, source
from rlk.operator import Operator
from rlk.records import KernelVersion, KernelVersions, ProfileRow, VersionTime
from rlk.report.markdown import table

# From the pages of reference.
ROOT = "../"
VERSIONS = ("version", "change", "predicted us", "measured us", "verdict", "commit")
TIMES = ("size", "version", "predicted us", "measured us", "beside it, us")
PROFILE = (
    "size", "direction", "longest launch", "us", "DRAM %", "SM %", "issue %", "occupancy %",
    "stall", "registers a thread",
)  # fmt: skip


def by_kernel(operators: Mapping[str, Operator], evidence: Evidence) -> str:
    """For each kernel a table of its versions, and one of their times that is folded."""
    parts = []
    for path, record in evidence.versions.items():
        parts += [f"[Record]({ROOT}records/{path}): {record.device}, {record.method}.\n"]
        for kernel in _kernels(record):
            rows = [row for row in record.rows if row.kernel == kernel]
            served = ", ".join(_link(name) for name in record.serves[kernel])
            times = list(_times(rows))
            parts += [f"### {kernel} {{ #{anchor(kernel)} }}\n", f"Launched by {served}.\n"]
            parts += [table(VERSIONS, (_version(row, _usual_size(rows)) for row in rows))]
            parts += folded(f"All {len(times)} times", [table(TIMES, times)])
    return "\n".join(parts) or f"{NOT_RUN}\n"


def missed(operators: Mapping[str, Operator], evidence: Evidence) -> str:
    """The missed limits of each operator, with what limits its kernels and what was tried."""
    limits = bench_limits.load()
    parts: list[str] = []
    for operator in operators.values():
        first = next((b.name for b in operator.backends if b.name in bench_limits.OURS), "")
        for path, record in evidence.bench(operator):
            judged = bench_limits.verdicts(record, limits, {operator.name: first})
            texts = [
                verdict.text.removeprefix(verdict.outcome).strip()
                for verdict in judged
                if (verdict.operator, verdict.outcome) == (operator.name, "missed")
            ]
            if texts:
                parts += [
                    f"### {operator.name} {{ #missed-{operator.name} }}\n",
                    source(record.origin, path, evidence.state(operator, record.origin)),
                    *folded(f"Missed: {len(texts)}", [*(f"- {text}" for text in texts), ""]),
                    *_profile(operator, first, evidence),
                    _attempts(operator, evidence),
                ]
    return "\n".join(parts) or "No limit of a record is missed.\n"


def anchor(kernel: str) -> str:
    """The anchor of a kernel's table."""
    return f"kernel-{re.sub(r'[^a-z0-9_]+', '-', kernel.lower()).strip('-')}"


def _kernels(record: KernelVersions) -> list[str]:
    return [*dict.fromkeys(row.kernel for row in record.rows)]


def _link(operator: str) -> str:
    return f"[{operator}]({ROOT}operators/{operator}.md)"


def _usual_size(rows: Sequence[KernelVersion]) -> str | None:
    """The size at which the versions of a kernel are told: the first of a prediction."""
    return next((t.size for row in rows for t in row.times if t.predicted_us), None)


def _version(row: KernelVersion, size: str | None) -> tuple[object, ...]:
    """A version with one of its times: one that was predicted, or that of a size, or the first."""
    told = sorted(row.times, key=lambda t: (t.predicted_us is None, t.size != size))[:1]
    predicted = next(map(_predicted, told), None)
    measured = next((f"{t.measured_us:g} at {t.size}" for t in told if t.measured_us), None)
    commit = f"`{row.commit[:9]}`" if row.commit else None
    return row.version, row.change, predicted, measured, f"{row.verdict}: {row.reason}", commit


def _times(rows: Sequence[KernelVersion]) -> Iterator[tuple[object, ...]]:
    """Every time, versions beside each other at each size."""
    found: dict[str, list[tuple[object, ...]]] = {}
    for row in rows:
        for time in row.times:
            beside = ", ".join(f"{name} {us:g}" for name, us in time.beside.items()) or None
            cells = (row.version, _predicted(time), time.measured_us, beside)
            found.setdefault(f"{time.size} {time.dtype}", []).append(cells)
    for size, lines in found.items():
        yield from ((size, *cells) for cells in lines)


def _predicted(time: VersionTime) -> str | None:
    return " to ".join(f"{us:g}" for us in dict.fromkeys(time.predicted_us or ())) or None


def _profile(operator: Operator, backend: str, evidence: Evidence) -> Iterator[str]:
    """The longest launch of each direction and size on the backend that is held to limits."""
    found = evidence.profile(operator)
    for path, record in found:
        longest: dict[tuple[str, str, str], ProfileRow] = {}
        for row in record.rows:
            if (row.operator, row.backend) == (operator.name, backend):
                key = (row.size, row.dtype, row.direction)
                longest[key] = max(longest.get(key, row), row, key=lambda r: r.duration_us or 0)
        yield source(record.origin, path, evidence.state(operator, record.origin))
        yield table(PROFILE, map(_launch, longest.values()))
    if not found:
        yield f"Profile: {NOT_RUN}.\n"


def _launch(row: ProfileRow) -> tuple[object, ...]:
    return (
        f"{row.size} {row.dtype}", row.direction, row.kernel, row.duration_us, row.dram_pct,
        row.sm_pct, row.issue_pct, row.occupancy_pct, row.stall, row.registers_per_thread,
    )  # fmt: skip


def _attempts(operator: Operator, evidence: Evidence) -> str:
    links = [
        f"[{kernel}](#{anchor(kernel)})"
        for record in evidence.versions.values()
        for kernel in _kernels(record)
        if operator.name in record.serves[kernel]
    ]
    return f"Attempts: {'; '.join(links) or 'none recorded'}.\n"
