# SPDX-License-Identifier: Apache-2.0
"""`rlk bits`: which bits an operator promises, and whether the recorded hashes witness them."""

import json
from typing import Annotated

import typer

from rlk.cli import select
from rlk.cli.console import console, table
from rlk.errors import RlkError
from rlk.gates import golden_hashes
from rlk.operator import Operator


def bits(
    operators: Annotated[
        list[str] | None, typer.Argument(metavar="[OP]...", help="Names; all if none.")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Record the hashes of golden's bits.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show bits versions; exit status 1 if recorded hashes are not of these bits."""
    chosen = select.named(operators) if operators else select.every()
    if write:
        for operator in filter(golden_hashes.has_golden, chosen):
            console(errors=True).print(f"wrote {golden_hashes.write(operator)}")
    faults = {operator.name: _fault(operator) for operator in chosen}
    if as_json:
        found = {o.name: {"bits_version": o.bits_version, "fault": faults[o.name]} for o in chosen}
        print(json.dumps(found, indent=2))
    else:
        rows = [(o.name, o.bits_version, faults[o.name] or _witness(o)) for o in chosen]
        console().print(table("", ("operator", "bits version", "golden hashes"), rows))
    raise typer.Exit(1 if any(faults.values()) else 0)


def _witness(operator: Operator) -> str:
    """What the hashes are, where nothing is wrong with them."""
    return "current" if golden_hashes.has_golden(operator) else "none: no CPU has these bits"


def _fault(operator: Operator) -> str | None:
    if not golden_hashes.has_golden(operator):
        return None
    try:
        return golden_hashes.stale(operator)
    except RlkError as error:
        if isinstance(error.__cause__, OSError):
            raise
        return str(error)
