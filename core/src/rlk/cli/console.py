# SPDX-License-Identifier: Apache-2.0
"""Output for people: tables, and progress that fits a terminal or a log."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

# Columns of a line that is not for a terminal: nothing is wrapped or cut.
_UNLIMITED = 1_000_000
# Lines of progress that a log gets.
_LINES = 10

Step = Callable[[int, str], None]


def console(*, errors: bool = False) -> Console:
    """Standard output, or standard error; without control characters unless a terminal."""
    stream = sys.stderr if errors else sys.stdout
    terminal = stream.isatty()
    return Console(
        file=stream,
        width=None if terminal else _UNLIMITED,
        force_terminal=terminal,
        # "[T, C]" is a shape, not markup.
        markup=False,
        emoji=False,
        highlight=False,
    )


def complain(sentence: str) -> None:
    """One sentence on standard error."""
    print(f"rlk: {sentence}", file=sys.stderr)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table; numbers stand right, None is a dash."""
    rows = [list(row) for row in rows]
    made = Table(
        title=title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(r[index], int | float | None) for r in rows)
        made.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(_cell, row))
    return made


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


@contextmanager
def progress(total: int) -> Iterator[Step]:
    """Show how many of `total` steps are done; call the value with that count and what is next."""
    out = console(errors=True)
    if not out.is_terminal:
        yield _sparse_lines(total)
        return
    now = TextColumn("{task.fields[now]}", markup=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), now)
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task("", total=total, now="")

        def step(done: int, now: str) -> None:
            bar.update(task, completed=done, now=now)

        yield step


def _sparse_lines(total: int) -> Step:
    start = time.monotonic()

    def step(done: int, now: str) -> None:
        if done == 0 or done * _LINES // total > (done - 1) * _LINES // total:
            seconds = time.monotonic() - start
            told = f"{done} of {total} done in {seconds:.0f} s, now {now}"
            print(told, file=sys.stderr, flush=True)

    return step
