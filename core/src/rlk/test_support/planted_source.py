# SPDX-License-Identifier: Apache-2.0
"""Faults planted into a copy of the CUDA source of an operator, and what its gates say of it.

    python -m rlk.test_support.planted_source PACKAGE OPERATOR SOURCE DTYPE JUDGMENT...

prints "status judgment tensor reason" for each record of the kernels that SOURCE has.
"""

import importlib
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlk import backends, registry
from rlk.cuda.launch import KernelModule
from rlk.gates import cases, judge
from rlk.operator import Operator
from rlk.test_support.fresh_process import run_python

# Seconds: the gates of one dtype, and compiling before them.
LONGEST = 300


class KernelCopy:
    """The kernels of an operator in a copy of its package, where they may be changed."""

    def __init__(self, operator: Operator, folder: Path) -> None:
        self.operator = operator
        # All of the package: kernels include files of other folders.
        package = Path(str(importlib.import_module(operator.package).__file__)).parent
        self.folder = Path(shutil.copytree(package, folder / package.name)) / operator.name

    def plant(self, name: str, right: str, wrong: str, places: int = 1) -> None:
        """Replace a text that must stand in as many places of a file."""
        file = self.folder / name
        text = file.read_text()
        assert text.count(right) == places, f"{name}: {text.count(right)} times {right}"
        file.write_text(text.replace(right, wrong))

    def run_gates(self, dtype: str, *judgments: str) -> tuple[bool, set[str], str]:
        """What gates say in a process of their own.

        A wrong address ends what a process can do with its GPU.

        Returns:
            Whether all is green, the red "judgment tensor" pairs, and all that was printed.
        """
        named = (self.operator.package, self.operator.name, self.folder / "kernel_cuda.cu")
        command = ["-m", "rlk.test_support.planted_source", *named, dtype, *judgments]
        done = run_python(*command, timeout=LONGEST)
        lines = [line.split(" ") for line in done.stdout.splitlines()]
        red = {f"{line[1]} {line[2]}" for line in lines if line[0] == "failed"}
        green = done.returncode == 0 and {line[0] for line in lines} == {"passed"}
        return green, red, done.stdout + done.stderr


def main(arguments: Sequence[str]) -> None:
    """Judge an operator with the kernels of a source as its CUDA backend."""
    package, name, source, dtype, *judgments = arguments
    declared = next(o for o in registry.declared_in(package) if o.name == name)
    kernels = KernelModule(declared, Path(source))
    golden = [backend for backend in declared.backends if backend.name == "golden"]
    planted = replace(declared, backends=(backends.cuda(lambda: kernels), *golden))
    for case in cases([planted], backend="cuda"):
        if case.dtype == dtype and case.judgment in judgments:
            for record in judge(case):
                print(record.status, case.judgment, record.tensor, record.reason)


if __name__ == "__main__":
    main(sys.argv[1:])
