# SPDX-License-Identifier: Apache-2.0
"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; None is a dash."""

    def line(cells: Sequence[object]) -> str:
        return f"| {' | '.join(map(_cell, cells))} |"

    return "\n".join([line(columns), line(["---"] * len(columns)), *map(line, rows)]) + "\n"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")
