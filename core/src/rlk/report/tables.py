# SPDX-License-Identifier: Apache-2.0
"""Rows of records as rows of tables; numbers stay those of the record."""

from collections.abc import Iterable, Iterator, Sequence

from rlk.records import BenchRow, ProfileRow, SurveyRow
from rlk.records.document import VERDICTS
from rlk.report.markdown import table

SPEED = (
    "variant", "version", "forward us", "x floor", "TB/s", "forward + backward us", "x floor",
    "x peer", "extra MiB", "eager us", "eager us, training", "host us",
    "host us, gradients", "backward on hard data",
)  # fmt: skip
VALUES = (
    "variant", "version", "rows that differ alone", "batches that differ", "parameter gradients",
    "correctly rounded", "worst ulp", "gradient elements beyond tolerance", "worst gradient ulp",
)  # fmt: skip
LIMITS = (
    "backend", "direction", "kernel", "us", "DRAM %", "SM %", "tensor %", "issue %", "occupancy %",
    "most stalled warps an issue", "L2 hits %", "MiB read", "MiB written", "grid", "block",
    "waves an SM", "registers a thread", "shared bytes a block",
)  # fmt: skip
Cells = list[tuple[object, ...]]


def speed(rows: Sequence[BenchRow]) -> list[tuple[str, Cells]]:
    """A heading for each size, and a line for each variant."""
    found: dict[str, Cells] = {}
    for row in rows:
        cells = found.setdefault(f"{row.size} {row.dtype} {row.layout}", [])
        ended = None if row.verdict == "measured" else verdict(row)
        cells.append(
            (
                row.variant, ended or row.version or None, row.forward_us, row.forward_ratio,
                row.terabytes_per_second.get("forward"), row.both_us, row.both_ratio,
                row.peer_ratio, row.extra_mib, row.eager_us, row.eager_train_us, row.host_us,
                row.host_grad_us,
                _each((name, f"{ratio:g}x") for name, ratio in row.hard_data.items()),
            )
        )  # fmt: skip
    return list(found.items())


def values(rows: Sequence[SurveyRow]) -> list[tuple[str, Cells]]:
    """A heading for each size, and a line for each variant."""
    found: dict[str, Cells] = {}
    for row in rows:
        cells = found.setdefault(f"{row.size} {row.dtype}", [])
        if row.verdict != "measured":
            cells.append((row.variant, verdict(row), *[None] * (len(VALUES) - 2)))
            continue
        outputs = {n: a for n, a in row.accuracy.items() if not n.startswith("d")}
        gradients = {n: a for n, a in row.accuracy.items() if n.startswith("d")}
        free = [
            f"{n} {'order-free' if is_free else 'by order'}"
            for n, is_free in row.order_free.items()
        ]
        cells.append(
            (
                row.variant,
                row.version or None,
                _counts(row.rows_alone, row.rows_judged),
                _counts(row.batches_differing, row.batches),
                ", ".join(free) or None,
                _each((n, f"{100 * a.correctly_rounded:g} %") for n, a in outputs.items()),
                _each((n, a.worst_ulp) for n, a in outputs.items()),
                _each((n, a.beyond) for n, a in gradients.items()),
                row.worst_gradient_ulp,
            )
        )
    return list(found.items())


def limits(rows: Sequence[ProfileRow]) -> list[tuple[str, Cells]]:
    """A heading for each size, and a line for each launch."""
    found: dict[str, Cells] = {}
    for row in rows:
        found.setdefault(f"{row.size} {row.dtype} {row.layout}", []).append(
            (
                row.backend, row.direction, row.kernel, row.duration_us, row.dram_pct, row.sm_pct,
                row.tensor_pct, row.issue_pct, row.occupancy_pct,
                _each([(row.stall or "", row.stalled_warps_per_issue)]), row.l2_hit_pct,
                row.dram_read_mib, row.dram_written_mib, row.grid, row.block, row.waves_per_sm,
                row.registers_per_thread, row.shared_bytes_per_block,
            )
        )  # fmt: skip
    return list(found.items())


def shown(columns: Sequence[str], found: Iterable[tuple[str, Cells]]) -> Iterator[str]:
    """Each table in Markdown, under its heading."""
    for heading, cells in found:
        yield f"**{heading}**\n"
        yield table(columns, cells)


def verdict(row: BenchRow | SurveyRow) -> str:
    """How the attempt ended, and why."""
    return f"{VERDICTS[row.verdict]}: {row.reason}" if row.reason else VERDICTS[row.verdict]


def _counts(counts: dict[str, int], total: int | None) -> str | None:
    return _each((name, f"{count} of {total}") for name, count in counts.items())


def _each(pairs: Iterable[tuple[str, object]]) -> str | None:
    words = [
        f"{n} {v:g}" if isinstance(v, float) else f"{n} {v}" for n, v in pairs if v is not None
    ]
    return ", ".join(words) or None
