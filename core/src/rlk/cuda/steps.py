# SPDX-License-Identifier: Apache-2.0
"""Launchers of one CUDA source that a backend calls one by one, as steps between others."""

import ctypes
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
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
        headers: text by file name of others that the source includes and no file holds.
    """

    def __init__(
        self,
        name: str,
        source: Path,
        entries: Mapping[str, Layout],
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self.source = source
        self.entries = dict(entries)
        self.generated = {f"rlk_{name}.h": library_header(name, self.entries.items()), **headers}
        self._loaded: dict[int, dict[str, Callable[..., None]]] = {}
        _made.add(self)

    def launch(self, entry: str, device: int, *values: Any) -> None:
        """Enqueue one step; `values` are the fields of its layout."""
        self.enqueuer(entry, device)(*values)

    def enqueuer(self, entry: str, device: int) -> Callable[..., None]:
        """`launch` of one step on one GPU, found.

        It also takes `call`, the operator and direction in traces, of `operator_call` if None.
        """
        return (self._loaded.get(device) or self.load(device))[entry]

    def binary(self, arch: str) -> Path:
        """The binary for an architecture such as sm_90, from the cache or compiled into it."""
        return build.build(self.source, self.name, self.generated, arch)

    def compile_only(self, arch: str) -> build.Compiled:
        """PTX and resources for an architecture; nothing is kept."""
        return build.compile_only(self.source, self.name, self.generated, arch)

    def load(self, device: int) -> dict[str, Callable[..., None]]:
        """The steps on a GPU by entry: the binary is built, opened and probed once per process."""
        library = binary_for(self.name, self.source, self.generated, device)
        self._loaded[device] = {entry: self._enqueuer(library, entry) for entry in self.entries}
        return self._loaded[device]

    def _enqueuer(self, library: Library, entry: str) -> Callable[..., None]:
        kernel = f"{self.name}.{entry}"
        pack = self.entries[entry].packer.pack
        function = library.function(f"rlk_{self.name}_{entry}", [ctypes.c_char_p])

        def enqueue(*values: Any, call: tuple[str, str] | None = None) -> None:
            status = function(pack(*values))
            if status or launch._open:
                library.check(status, kernel)
                launch.record("cuda", kernel, library.digest, call)

        return enqueue


def _after_fork() -> None:
    """In a forked process the next step asks for the library again, which is refused."""
    for steps in _made:
        steps._loaded.clear()


os.register_at_fork(after_in_child=_after_fork)
