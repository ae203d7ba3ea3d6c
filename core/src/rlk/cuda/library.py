# SPDX-License-Identifier: Apache-2.0
"""A loaded binary: what it must be before anything in it is called."""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlk.cuda import build, toolchain
from rlk.errors import BackendError

# Whether this process was forked from one that had loaded a library: CUDA does not survive that.
_forked = False
_loaded = False


class Library:
    """A binary of the cache, opened.

    Raises:
        BackendError: it was compiled for another ABI or with flags that change bits.
    """

    def __init__(self, path: Path, operator: str) -> None:
        global _loaded
        manifest = build.read_manifest(path.parent)
        self.path = path
        self.operator = operator
        self.digest = str(manifest["digest"])
        refuse_after_fork(operator)
        bad = toolchain.forbidden_flags(manifest["flags"])
        if bad:
            raise self._refusal("be compiled with IEEE arithmetic", ", ".join(bad))
        try:
            self._binary = ctypes.CDLL(str(path))
        except OSError as error:
            raise self._refusal("be a shared library", str(error)) from error
        _loaded = True
        abi = self.function("rlk_abi_version", [])()
        if abi != toolchain.ABI:
            raise self._refusal(f"have ABI {toolchain.ABI}", str(abi))
        self._error_string = self.function("rlk_error_string", [ctypes.c_int], ctypes.c_char_p)

    def function(
        self, name: str, arguments: list[Any], result: Any = ctypes.c_int
    ) -> Callable[..., Any]:
        """An exported function; calls release the interpreter lock."""
        refuse_after_fork(self.operator)
        try:
            found = getattr(self._binary, name)
        except AttributeError as error:
            raise self._refusal(f"export {name}", "none") from error
        found.argtypes, found.restype = arguments, result
        return found

    def check(self, status: int, what: str) -> None:
        """Raise what a function of this library returned, unless it is success."""
        if status != 0:
            text = self._error_string(status).decode()
            raise BackendError(
                f'{self.operator}: backend "cuda" must run {what}, got CUDA error {status}: {text}'
            )

    def _refusal(self, requirement: str, actual: str) -> BackendError:
        return BackendError(
            f"{self.operator}: {self.path} must {requirement}, got {actual}; "
            "delete its folder to have it built again"
        )


def refuse_after_fork(operator: str) -> None:
    """Raise in a process forked from one that had loaded a library."""
    if _forked:
        raise BackendError(
            f"{operator}: the process must not be forked after CUDA was used, got a forked one; "
            "start it by spawn"
        )


def _after_fork() -> None:
    global _forked
    _forked = _forked or _loaded


os.register_at_fork(after_in_child=_after_fork)
