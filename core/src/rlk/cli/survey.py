# SPDX-License-Identifier: Apache-2.0
"""`rlk survey`: invariance and accuracy of our backends and of every other library that is here."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from rlk.cli import report_file, select
from rlk.cli.console import console, progress, table
from rlk.errors import RlkError, one_of
from rlk.gates.case import DEFAULT_SEED
from rlk.operator import Operator
from rlk.records import Survey, SurveyRow, origin
from rlk.report import tables
from rlk.survey.values import Place, names, places
from rlk.survey.values import survey as survey_variant


def survey(
    operators: Annotated[
        list[str] | None, typer.Argument(metavar="[OP]...", help="Names of operators.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Survey every operator.")] = False,
    variant: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Backend or library; repeatable. All if none."),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Dtype of the first input; repeatable.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=2, help="Rows of a call; what the oracle can do if none.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=select.MAX_SEED, help="Seed of the inputs.")
    ] = DEFAULT_SEED,
    json: Annotated[Path | None, typer.Option(help="File for the JSON record.")] = None,
) -> None:
    """Measure what depends on the batch and how far from FP64 it is, for everyone who is here."""
    chosen = select.some("survey", operators or [], everything)
    planned = [
        (place, name)
        for operator in chosen
        for wanted in dtype or ["bfloat16"]
        for place in _places(operator, wanted, rows, seed)
        for name in _variants(operator, variant)
    ]
    with report_file.record_writer("survey", json) as write:
        made = origin()
        found: list[SurveyRow] = []
        finished = False
        try:
            with progress(len(planned)) as step:
                for done, (place, name) in enumerate(planned):
                    step(done, f"{place.operator.name} {place.label} {name}")
                    found.append(survey_variant(place, name))
            finished = True
        finally:
            with report_file.uninterrupted():
                write(Survey(origin=made, seed=seed, interrupted=not finished, rows=found))
                _print(found)
    _require_named(found, variant)


def _places(operator: Operator, dtype: str, rows: int | None, seed: int) -> list[Place]:
    known = operator.inputs[0].dtype
    if dtype not in known:
        raise RlkError(f"survey: --dtype must be one of {', '.join(known)}, got {dtype!r}")
    return places(operator, dtype, rows, seed)


def _variants(operator: Operator, wanted: list[str] | None) -> list[str]:
    known = names(operator)
    for name in wanted or []:
        if name not in known:
            raise RlkError(
                f"survey: --variant of {operator.name} must be {one_of(known)}, got {name!r}"
            )
    # Minutes in Triton's interpreter, and in golden at the sizes of models: only by name.
    slow = "golden" if torch.cuda.is_available() else "triton"
    return wanted or [name for name in known if name != slow]


def _print(rows: list[SurveyRow]) -> None:
    out = console()
    for operator in dict.fromkeys(row.operator for row in rows):
        of_operator = [row for row in rows if row.operator == operator]
        for heading, cells in tables.values(of_operator):
            out.print(table(f"{operator} {heading}", tables.VALUES, cells))


def _require_named(rows: list[SurveyRow], wanted: list[str] | None) -> None:
    """Who was asked for by name must have been there."""
    for row in rows:
        if wanted and row.verdict == "not applicable":
            raise RlkError(f"survey: --variant {row.variant} must run here, got: {row.reason}")
