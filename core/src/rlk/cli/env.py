# SPDX-License-Identifier: Apache-2.0
"""`rlk env`: the facts of this machine and process that every report carries."""

import json
from typing import Annotated, Any

import typer

from rlk import environment
from rlk.cli.console import console, table


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show versions, device, sources and the arithmetic observed on this machine."""
    facts = environment.facts()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    packages = facts.pop("packages")
    rows = [(name.replace("_", " "), _words(value)) for name, value in facts.items()]
    rows += [(name, _package(package)) for name, package in packages.items()]
    console().print(table("", ("fact", "value"), rows))


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


def _package(facts: dict[str, Any]) -> str:
    if facts["commit"] is None:
        return facts["version"]
    changed = ", changed since" if facts["dirty"] else ""
    return f"{facts['version']}, commit {facts['commit']}{changed}"
