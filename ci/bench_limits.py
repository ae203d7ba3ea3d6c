# SPDX-License-Identifier: Apache-2.0
"""The limits of bench_limits.toml, held against a record of a benchmark.

Limits are for readers: a miss is told, not refused.
"""

import itertools
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rlk.records import FLOOR, Bench, BenchRow, fastest_other

FILE = Path(__file__).with_suffix(".toml")
FASTEST, ABSOLUTE = "the fastest peer", "us"
# What is timed, and the field of a row that holds it.
TIMES = {
    "forward": "forward_us",
    "both": "both_us",
    "host": "host_us",
    "host_grad": "host_grad_us",
    "host_train": "host_train_us",
}
OURS = ("cuda", "triton")


class Most(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """At most so many multiples, or microseconds."""

    forward: float | None = None
    both: float | None = None
    host: float | None = None
    host_grad: float | None = None
    host_train: float | None = None


class Limits(Most, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of some operators at some sizes against one reference."""

    operators: list[str]
    sizes: list[str]
    dtype: str = "bfloat16"
    layout: str = "contiguous"
    against: str = FLOOR
    aim: Most = Most()


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All limits, which are of one GPU."""

    device: str
    limits: list[Limits]


@dataclass(frozen=True)
class Verdict:
    """What became of one limit: `met`, `missed` or `not measured`, and the sentence."""

    outcome: str
    text: str
    operator: str


def load(file: Path = FILE) -> Table:
    """The limits of a file."""
    return msgspec.convert(tomllib.loads(file.read_text()), Table)


def verdicts(record: Bench, table: Table, first: Mapping[str, str]) -> list[Verdict]:
    """One for each limit on an operator of the record; none on another GPU.

    Args:
        record: of a benchmark.
        table: the limits.
        first: the backend by operator that a caller gets who names none.
    """
    rows: dict[tuple[str, str, str, str], list[BenchRow]] = {}
    for row in record.rows:
        rows.setdefault((row.operator, row.size, row.dtype, row.layout), []).append(row)
    measured = {operator for operator, *_ in rows}
    if record.origin.device != table.device:
        return []
    return [
        _verdict(limits, key, kind, what, most, rows.get(key, []), first.get(key[0], OURS[0]))
        for limits in table.limits
        for key in _keys(limits)
        if key[0] in measured
        for kind, what, most in _bounds(limits)
    ]


def counted(found: Sequence[Verdict]) -> str:
    """Such as: limits: 41 met, 3 missed, 2 not measured."""
    counts = Counter(verdict.outcome for verdict in found)
    outcomes = ("met", "missed", "not measured")
    return "limits: " + ", ".join(f"{counts[outcome]} {outcome}" for outcome in outcomes)


def _keys(limits: Limits) -> Iterator[tuple[str, str, str, str]]:
    sizes = [size for pattern in limits.sizes for size in spelled(pattern)]
    for operator, size in itertools.product(limits.operators, sizes):
        yield operator, size, limits.dtype, limits.layout


def spelled(pattern: str) -> list[str]:
    """The sizes of a pattern such as {1,8}x3072."""
    parts = re.split(r"\{([^}]*)\}", pattern)
    choices = [part.split(",") if place % 2 else [part] for place, part in enumerate(parts)]
    return ["".join(words) for words in itertools.product(*choices)]


def _bounds(limits: Limits) -> Iterator[tuple[str, str, float]]:
    for kind, most in (("bound", limits), ("aim", limits.aim)):
        for what in TIMES:
            value = getattr(most, what)
            if value is not None:
                yield kind, what, value


def _verdict(
    limits: Limits, key: tuple[str, ...], kind: str, what: str, most: float,
    rows: Sequence[BenchRow], first: str,
) -> Verdict:  # fmt: skip
    unit = " us" if limits.against == ABSOLUTE else f"x {limits.against}"
    place = " ".join(word for word in key if word != "contiguous")
    head = f"{kind} {place}: {what} <= {most:g}{unit}"
    given = {row.variant: _time(row, what) for row in rows}
    reference = 1.0 if limits.against == ABSOLUTE else _reference(limits.against, rows, what)
    found = {b: t / reference for b in OURS if (t := given.get(b)) is not None and reference}
    if first not in found:
        return Verdict("not measured", f"not measured  {head}", key[0])
    outcome = "met" if found[first] <= most else "missed"
    others = "".join(f", {b} {ratio:.3g}" for b, ratio in found.items() if b != first)
    base = "" if limits.against == ABSOLUTE else f" of {reference:.4g} us"
    text = f"{outcome:<6}  {head}: {first} {found[first]:.3g}{others}{base}"
    return Verdict(outcome, text, key[0])


def _reference(against: str, rows: Sequence[BenchRow], what: str) -> float | None:
    if against == FASTEST:
        other = fastest_other(rows, TIMES[what])
        return other and _time(other, what)
    return next((_time(row, what) for row in rows if row.variant == against), None)


def _time(row: BenchRow, what: str) -> float | None:
    value: float | None = getattr(row, TIMES[what])
    return value
