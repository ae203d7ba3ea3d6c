# SPDX-License-Identifier: Apache-2.0
"""`rlk list`: what is installed."""

from rlk.cli import select
from rlk.cli.console import console, table


def list_operators() -> None:
    """List the installed operators with their backends and claims."""
    operators = select.installed().values()
    rows = [
        (
            o.name,
            o.package,
            o.bits_version,
            ", ".join(b.name for b in o.backends),
            ", ".join(dict.fromkeys(c.word for c in o.claims)),
        )
        for o in operators
    ]
    columns = ("operator", "package", "bits version", "backends", "claims")
    console().print(table("", columns, rows))
