# SPDX-License-Identifier: Apache-2.0
"""Launchers of one CUDA source that a backend calls one by one, as steps between others."""

import ctypes
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlk import launch
from rlk.cuda import build
from rlk.cuda.header import Layout, library_header
from rlk.cuda.launch import binary_for
from rlk.cuda.library import Library

_made: "weakref.WeakSet[Steps]" = weakref.WeakSet()


class Steps:
    """The launchers of a source: int rlk_<name>_<entry>(const <Layout>*).

    Args:
        name: begins the names of launchers, and every error.
        source: the .cu file, which includes rlk_<name>.h.
        entries: the argument of each launcher.
    """

    def __init__(self, name: str, source: Path, entries: Mapping[str, Layout]) -> None:
        self.name = name
        self.source = source
        self.entries = dict(entries)
        self.generated = {f"rlk_{name}.h": library_header(name, self.entries.items())}
        self._loaded: dict[int, tuple[Library, dict[str, Callable[..., int]]]] = {}
        _made.add(self)

    def launch(self, entry: str, device: int, *values: Any) -> None:
        """Enqueue one step; `values` are the fields of its layout."""
        library, functions = self._loaded.get(device) or self.load(device)
        status = functions[entry](self.entries[entry].packer.pack(*values))
        if status or launch._open:
            kernel = f"{self.name}.{entry}"
            library.check(status, kernel)
            launch.record("cuda", kernel, library.digest)

    def binary(self, arch: str) -> Path:
        """The binary for an architecture such as sm_90, from the cache or compiled into it."""
        return build.build(self.source, self.name, self.generated, arch)

    def compile_only(self, arch: str) -> build.Compiled:
        """PTX and resources for an architecture; nothing is kept."""
        return build.compile_only(self.source, self.name, self.generated, arch)

    def load(self, device: int) -> tuple[Library, dict[str, Callable[..., int]]]:
        """The binary for a GPU and its launchers, built, opened and probed once per process."""
        library = binary_for(self.name, self.source, self.generated, device)
        argument = [ctypes.c_char_p]
        functions = {e: library.function(f"rlk_{self.name}_{e}", argument) for e in self.entries}
        self._loaded[device] = library, functions
        return self._loaded[device]


def _after_fork() -> None:
    """In a forked process the next step asks for the library again, which is refused."""
    for steps in _made:
        steps._loaded.clear()


os.register_at_fork(after_in_child=_after_fork)
