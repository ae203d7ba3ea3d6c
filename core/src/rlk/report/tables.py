# SPDX-License-Identifier: Apache-2.0
"""Rows of records as rows of tables; numbers stay those of the record."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from rlk.records import BenchRow, ProfileRow, SurveyRow, TensorAccuracy, fastest_other
from rlk.records.document import VERDICTS
from rlk.report.markdown import table
from rlk.report.sizes import grouped

SPEED = (
    "variant", "version", "forward us", "forward, x floor", "forward TB/s", "backward us",
    "both us", "both, x floor", "both, x fastest other", "extra MiB", "eager us",
    "eager us, training", "host us", "host us, gradients", "backward on hard data",
)  # fmt: skip
VALUES = (
    "variant", "version", "rows that differ alone", "batches that differ", "parameter gradients",
    "correctly rounded", "worst ulp at RMS", "gradient elements beyond tolerance",
    "worst gradient ulp at RMS",
)  # fmt: skip
LIMITS = (
    "backend", "direction", "kernel", "us", "DRAM %", "SM %", "tensor %", "issue %", "occupancy %",
    "most stalled warps an issue", "L2 hits %", "MiB read", "MiB written", "grid", "block",
    "waves an SM", "registers a thread", "shared bytes a block",
)  # fmt: skip
# One line for each size of an operator.
SUMMARY = (
    "size", "forward us", "forward, x floor", "both us", "both, x floor", "fastest other",
    "its forward us", "its both us", "both, x fastest other",
)  # fmt: skip
Row = TypeVar("Row", BenchRow, SurveyRow)
Cells = list[tuple[object, ...]]


def speed(rows: Sequence[BenchRow]) -> list[tuple[str, Cells]]:
    """A heading for each size, with who is the fastest other, and a line for each variant."""
    found: list[tuple[str, Cells]] = []
    for size, of_size in _by_size(rows).items():
        other = fastest_other(of_size)
        heading = f"{size}; fastest other: {other.variant}" if other else size
        found.append((heading, [_timed(row) for row in of_size]))
    return found


def _timed(row: BenchRow) -> tuple[object, ...]:
    ended = None if row.verdict == "measured" else verdict(row)
    return (
        row.variant, ended or row.version or None, _spread(row.forward_us, row.forward_spread_us),
        row.forward_ratio, row.terabytes_per_second.get("forward"),
        _spread(row.backward_us, row.backward_spread_us), row.both_us, row.both_ratio,
        row.peer_ratio, row.extra_mib, row.eager_us, row.eager_train_us, row.host_us,
        row.host_grad_us, _each((name, f"{ratio:g}x") for name, ratio in row.hard_data.items()),
    )  # fmt: skip


def summary(rows: Sequence[BenchRow], ours: str) -> Cells:
    """A line for each size: one backend beside the fastest other; as SUMMARY names the cells.

    A size names dtype and layout only where they are not those of `shared`.
    """
    found: Cells = []
    short = shared(rows) is not None
    for key, of_size in _by_size(rows).items():
        size = of_size[0].size if short else key
        mine = next((row for row in of_size if row.variant == ours), None)
        other = fastest_other(of_size)
        if mine is None or mine.both_us is None:
            told = None if mine is None else verdict(mine)
            found.append((size, told, *[None] * (len(SUMMARY) - 2)))
            continue
        found.append(
            (
                size, _spread(mine.forward_us, mine.forward_spread_us), mine.forward_ratio,
                mine.both_us, mine.both_ratio,
                *((other.variant, other.forward_us, other.both_us) if other else (None,) * 3),
                mine.peer_ratio,
            )
        )  # fmt: skip
    return found


def shared(rows: Sequence[BenchRow]) -> str | None:
    """Dtype and layout if all rows have the same, such as bfloat16 contiguous."""
    kinds = {f"{row.dtype} {row.layout}" for row in rows}
    return kinds.pop() if len(kinds) == 1 else None


def absent(rows: Sequence[Row]) -> tuple[list[Row], str | None]:
    """The rows without those of variants that were nowhere applicable, and who these are."""
    here = {row.variant for row in rows if row.verdict != "not applicable"}
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.variant not in here:
            names = reasons.setdefault(row.reason or VERDICTS[row.verdict], [])
            names += [] if row.variant in names else [row.variant]
    told = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in reasons.items())
    return [r for r in rows if r.variant in here], f"Not run here: {told}.\n" if told else None


def _by_size(rows: Sequence[BenchRow]) -> dict[str, list[BenchRow]]:
    return grouped(rows, lambda row: f"{row.size} {row.dtype} {row.layout}")


def _spread(median: float | None, spread: float | None) -> str | float | None:
    # The spread says how many digits of the median mean something: one of its own is enough.
    return median if median is None or spread is None else f"{median:g}\u00a0±\u00a0{spread:.1g}"


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
                _each((n, _rounded(a)) for n, a in outputs.items()),
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


def _rounded(accuracy: TensorAccuracy) -> str:
    """The share that is correctly rounded; counted where digits hide elements that are not."""
    share = f"{100 * accuracy.correctly_rounded:g} %"
    others = sum(n for label, n in accuracy.ulp_histogram.items() if label != "0")
    if share == "100 %" and others:
        return f"all but {others} of {accuracy.elements}"
    return share


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
