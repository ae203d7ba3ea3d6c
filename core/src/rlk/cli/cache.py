# SPDX-License-Identifier: Apache-2.0
"""`rlk cache`: the compiled kernels that are kept, and their removal."""

from typing import Annotated

import typer

from rlk.cli.console import console, table
from rlk.cuda import build
from rlk.cuda import cache as kept

_COLUMNS = ("binary", "architecture", "compiler", "MiB", "folder")


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all of them.")] = False,
) -> None:
    """List the kernels in the cache; sources that change leave their old ones behind."""
    held = kept.clear() if clear else list(kept.entries())
    rows = [(e.name, e.arch, f"nvcc {e.nvcc}", f"{e.size / 2**20:.1f}", e.folder) for e in held]
    out = console()
    if rows:
        out.print(table("", _COLUMNS, rows))
    size = sum(entry.size for entry in held) / 2**20
    done = "removed from" if clear else "in"
    out.print(f"{len(held)} binaries, {size:.1f} MiB, {done} {build.cache_folder()}")
