# SPDX-License-Identifier: Apache-2.0
"""`rlk bench`: times beside the least that the hardware allows, where the gates are green."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, get_args

import torch
import typer

from rlk.bench import compiled, refusals
from rlk.bench.measure import METHOD, measure
from rlk.bench.work import Work, works
from rlk.cli import report_file, select
from rlk.cli.console import console, progress, table
from rlk.errors import RlkError
from rlk.operator import FLOATS, Layout, Operator
from rlk.records import Bench, BenchRow, origin
from rlk.report import tables


def bench(
    operators: Annotated[
        list[str] | None, typer.Argument(metavar="[OP]...", help="Names of operators.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Measure every operator.")] = False,
    rows: Annotated[
        list[int] | None, typer.Option(min=1, help="Further row counts; repeatable.")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Repeatable; bfloat16 if none.")] = None,
    layout: Annotated[
        list[str] | None, typer.Option(help="Repeatable; those declared if none.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="File for the JSON record.")] = None,
    jobs: Annotated[
        int,
        typer.Option(min=0, help="Processes that judge gates first; 0 is one for each processor."),
    ] = 1,
) -> None:
    """Time our backends and other libraries on a GPU; none of ours whose gate is red."""
    chosen = select.some("bench", operators or [], everything)
    dtypes = _known("--dtype", dtype, FLOATS) or ["bfloat16"]
    layouts: list[Layout] = _known("--layout", layout, get_args(Layout))
    if not torch.cuda.is_available():
        raise RlkError(
            "bench: the machine must have an NVIDIA GPU, got none; rlk survey runs without one"
        )
    planned = [
        (operator, name, works(operator, getattr(torch, name), rows or [], layouts))
        for operator in chosen
        for name in dtypes
    ]
    with report_file.record_writer("bench", json) as write:
        found: list[BenchRow] = []
        made = origin()
        finished = False

        def keep() -> None:
            write(Bench(origin=made, method=METHOD, interrupted=not finished, rows=found))

        try:
            _run(planned, found, keep, jobs or os.cpu_count() or 1)
            finished = True
        finally:
            with report_file.uninterrupted():
                keep()


def _known(option: str, wanted: list[str] | None, known: tuple[str, ...]) -> list:
    for value in wanted or []:
        if value not in known:
            raise RlkError(f"bench: {option} must be one of {', '.join(known)}, got {value!r}")
    return wanted or []


def _run(
    planned: list[tuple[Operator, str, list[Work]]],
    found: list[BenchRow],
    keep: Callable,
    jobs: int,
) -> None:
    """Judge, measure, print and record one size after another; with jobs, judge all first."""
    total, done = sum(len(works) for _, _, works in planned), 0
    with progress(total) as step:
        judged: list[refusals.Refusals] = []
        if jobs > 1:
            step(done, "the gates of all operators")
            pairs = [(operator, dtype) for operator, dtype, _ in planned]
            judged = refusals.side_by_side(pairs, jobs)
            step(done, "the code of torch.compile")
            compiled.side_by_side([work for *_, its_works in planned for work in its_works], jobs)
        for place, (operator, dtype, its_works) in enumerate(planned):
            step(done, f"{operator.name} {dtype}, its gates")
            refused = judged[place] if judged else refusals.refusals(operator, dtype)
            for work in its_works:
                step(done, f"{operator.name} {work.label} {dtype} {work.layout}")
                measured = measure(work, refused)
                torch.cuda.empty_cache()
                for heading, cells in tables.speed(measured):
                    console().print(table(f"{operator.name} {heading}", tables.SPEED, cells))
                found += measured
                done += 1
                keep()
