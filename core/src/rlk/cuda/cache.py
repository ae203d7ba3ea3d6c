# SPDX-License-Identifier: Apache-2.0
"""What the cache of binaries holds, and its removal."""

import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlk.cuda import build

# <name>-<arch>-<digest>-nvcc<release>, as build.py names an entry.
_ENTRY = re.compile(r"(?P<name>\w+)-(?P<arch>sm_\w+)-[0-9a-f]{32}-nvcc(?P<nvcc>[\d.]+)")


@dataclass(frozen=True)
class Entry:
    """One binary: its folder, what it was compiled from and by, and its bytes on disk."""

    folder: Path
    name: str
    arch: str
    nvcc: str
    size: int


def entries() -> Iterator[Entry]:
    """The binaries in the cache, by name."""
    for folder in sorted(build.cache_folder().glob("*-nvcc*")):
        found = _ENTRY.fullmatch(folder.name)
        if found and folder.is_dir():
            size = sum(file.stat().st_size for file in folder.iterdir())
            yield Entry(folder, size=size, **found.groupdict())


def clear() -> list[Entry]:
    """Remove all that rlk wrote into the cache, and nothing else.

    Returns:
        The binaries that were there. A process that has loaded one goes on with it.
    """
    held = list(entries())
    for entry in held:
        shutil.rmtree(entry.folder)
    for left in build.cache_folder().glob(".*"):
        # Locks, and what killed builds left: .<entry>.lock and .<entry>.<random>/
        if _ENTRY.fullmatch(left.name[1:].rpartition(".")[0]):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    for verdict in build.cache_folder().glob("strict-math-*.json"):
        verdict.unlink()
    return held


def unwritable() -> str | None:
    """Why nothing can be written into the cache, or None."""
    folder = build.cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)
