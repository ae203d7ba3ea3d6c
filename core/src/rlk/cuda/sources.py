# SPDX-License-Identifier: Apache-2.0
"""What a binary is compiled from: the texts of its source and of every header of ours."""

import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import rlk
from rlk.cuda import toolchain
from rlk.errors import BackendError

# Change it with the layout of an entry.
FORMAT = 1
MANIFEST = "manifest.json"

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^">]+)[">]', re.MULTILINE)


def digest(source: Path, name: str, generated: Mapping[str, str], flags: Sequence[str]) -> str:
    """What a binary depends on: texts, flags, ABI and machine, but no place.

    Raises:
        BackendError: a text cannot be read.
    """
    try:
        texts = included(source, generated)
    except OSError as error:
        raise BackendError(f"{name}: {source} must be readable, got {error.strerror}") from error
    every = [*flags, *toolchain.LINK_FLAGS]
    parts = [FORMAT, toolchain.ABI, platform.machine(), every, sorted(texts.items())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def include_roots(source: Path) -> list[Path]:
    """The folders that includes are relative to: core's, and that of the source's package."""
    folder = source.absolute().parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return list(dict.fromkeys([Path(rlk.__file__).parents[1], folder]))


def included(source: Path, generated: Mapping[str, str]) -> dict[str, str]:
    """The text of the source and of every header of ours that it includes, by name."""
    roots = include_roots(source)
    found: dict[str, str] = {}

    def read(name: str, text: str, folder: Path | None) -> None:
        found[name] = text
        for wanted in _INCLUDE.findall(text):
            # As the compiler searches: beside the file, then what is generated, then the roots.
            beside = folder is not None and (folder / wanted).is_file()
            if wanted in generated and not beside:
                if wanted not in found:
                    read(wanted, generated[wanted], None)
                continue
            places = [root / wanted for root in ([folder, *roots] if folder else roots)]
            path = next((place for place in places if place.is_file()), None)
            key = _relative(path, roots) if path else ""
            if path and key not in found:
                read(key, path.read_text(), path.parent)

    read(source.name, source.read_text(), source.absolute().parent)
    return found


def _relative(path: Path, roots: list[Path]) -> str:
    """The path below its root: an entry does not depend on where the sources are installed."""
    resolved = path.resolve()
    for root in roots:
        if resolved.is_relative_to(root.resolve()):
            return str(resolved.relative_to(root.resolve()))
    return str(resolved)
