# SPDX-License-Identifier: Apache-2.0
"""Sizes of rows of records: what is one size at several numbers of rows, and which are missing."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from rlk.bench.work import MOST_BYTES
from rlk.records import Bench, BenchRow

Row = TypeVar("Row")
_SHAPE = re.compile(r"\d+(?:x\d+)*")
_ASKED = re.compile(r"--rows[ =](\d+)")


def without_rows(rows: Sequence[BenchRow]) -> list[str]:
    """The size of each row of one operator, such as 1x128x24x128, with the number of rows open.

    A shape may hold that number twice: the axis of rows is where each shape has its own.
    """
    places = [
        {i for i, part in enumerate(shape.split("x")) if part == str(row.rows)}
        for row in rows
        for shape in _shapes(row.size)
    ]
    place = min(set.intersection(*places), default=0) if places else 0
    return [" ".join(_opened(word, place) for word in row.size.split(" ")) for row in rows]


def grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Rows by what a key says of each, in the order of the first of each group."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def asked(command: str, operator: str) -> set[int]:
    """The numbers of rows for which commands ask of an operator besides those it declares.

    Args:
        command: of one run, or of several, with "; " between them.
    """
    runs = [run for run in command.split("; ") if {operator, "--all"} & set(run.split())]
    return {int(count) for run in runs for count in _ASKED.findall(run)}


def left_out(record: Bench, operator: str) -> Iterator[str]:
    """A sentence for each size that lacks a number of rows for which its run was asked.

    And one for the operator at which the run was interrupted.
    """
    if record.interrupted and record.rows and record.rows[-1].operator == operator:
        last = record.rows[-1]
        yield (
            f"Nothing was measured after {last.size} {last.dtype} {last.layout}: the run was "
            "interrupted.\n"
        )
        return
    wanted = asked(record.origin.command, operator)
    rows = [row for row in record.rows if row.operator == operator and row.rows is not None]
    found: dict[str, set[int]] = {}
    for size, row in zip(without_rows(rows), rows, strict=True):
        found.setdefault(f"{size} {row.dtype} {row.layout}", set()).add(row.rows or 0)
    for size, counts in found.items():
        missing = sorted(wanted - counts)
        if missing:
            yield (
                f"{size}: not measured at {', '.join(map(str, missing))} rows, its largest tensor "
                f"would take more than {MOST_BYTES / 1e9:g} GB.\n"
            )


def _shapes(size: str) -> list[str]:
    return [word for word in size.split(" ") if _SHAPE.fullmatch(word)]


def _opened(word: str, place: int) -> str:
    parts = word.split("x")
    if _SHAPE.fullmatch(word) and place < len(parts):
        parts[place] = "T"
    return "x".join(parts)
