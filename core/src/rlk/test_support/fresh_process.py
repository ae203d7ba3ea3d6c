# SPDX-License-Identifier: Apache-2.0
"""Python in a process of its own: what a package imports, computes or runs there."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import rlk

IMPORT = """
import json, sys, torch
before = set(sys.modules)
import {package}
print(json.dumps(sorted(set(sys.modules) - before)))
"""
# What commands, tests and kernels need, and an import of a package does not.
OPTIONAL = {"triton", "typer", "rich", "msgspec", "pytest"}


def folders_of(*packages: ModuleType) -> list[str]:
    """The folders that these packages are imported from."""
    return [str(Path(str(package.__file__)).parents[1]) for package in packages]


def run_python(
    *arguments: object,
    folders: Iterable[object] = (),
    environment: Mapping[str, str | None] | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """What a fresh Python process said and how it ended.

    Args:
        arguments: of the interpreter.
        folders: where it looks for modules first.
        environment: variables to set; None takes one away.
        timeout: seconds.
    """
    path = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
    changed = {"PYTHONPATH": os.pathsep.join(filter(None, path)), **(environment or {})}
    kept = {name: value for name, value in {**os.environ, **changed}.items() if value is not None}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, env=kept, capture_output=True, text=True, check=False, timeout=timeout
    )


def printed_without_gpu(program: str, *packages: ModuleType) -> list[str]:
    """The lines that a program prints beside core and these packages, where there is no GPU."""
    finished = run_python(
        "-c",
        program,
        folders=folders_of(rlk, *packages),
        environment={"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": None},
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()


def modules_of_import(package: ModuleType) -> list[str]:
    """The modules that importing a package adds to those of torch."""
    return json.loads(*printed_without_gpu(IMPORT.format(package=package.__name__), package))


def assert_nothing_optional(imported: Sequence[str], *others: str) -> None:
    """Assert that modules are of no package of `OPTIONAL` or of others, no kernel, no command."""
    heavy = [name for name in imported if name.split(".")[0] in {*OPTIONAL, *others}]
    assert heavy == [], heavy
    ours = [n for n in imported if "kernel" in n or n.split(".")[:2] == ["rlk", "cli"]]
    assert ours == [], ours


def status_and_output(*arguments: object, folders: Iterable[object]) -> tuple[int, str]:
    """(exit status, all that it said) of a fresh Python process."""
    finished = run_python(*arguments, folders=folders)
    return finished.returncode, finished.stdout + finished.stderr
