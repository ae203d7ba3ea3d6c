# SPDX-License-Identifier: Apache-2.0
"""`rlk build`: compile CUDA kernels before their first call."""

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated

import torch
import typer

from rlk.cli import select
from rlk.cli.console import console, progress, table
from rlk.cuda.build import resources
from rlk.cuda.kernels import BACKEND, Kernels, of_core, of_operator
from rlk.cuda.launch import device_arch
from rlk.errors import BackendError, RlkError

_COLUMNS = ("operator", "architecture", "kernels", "registers", "spilled bytes", "library")


def build(
    operators: Annotated[
        list[str] | None, typer.Argument(metavar="[OP]...", help="Names of operators.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Build every operator.")] = False,
    arch: Annotated[
        list[str] | None,
        typer.Option(help="Architecture such as sm_90; repeatable. The GPUs here if none."),
    ] = None,
) -> None:
    """Compile CUDA kernels into the cache, and probe them on the GPUs that are here."""
    modules = _modules(operators or [], everything)
    present = {i: device_arch(i) for i in range(torch.cuda.device_count())}
    archs = list(dict.fromkeys(arch or present.values()))
    if not archs:
        raise RlkError("build: --arch must be given where there is no GPU, got none; try sm_90")
    libraries = _compile(modules, archs)
    for module in modules.values():
        for device, its_arch in present.items():
            if its_arch in archs:
                module.load(device)
    rows = [
        _row(name, its_arch, libraries[name, its_arch]) for name in modules for its_arch in archs
    ]
    console().print(table("", _COLUMNS, rows))


def _modules(names: Sequence[str], everything: bool) -> dict[str, Kernels]:
    """The kernels asked for, by name: of operators that have a source, of core with all."""
    if names and everything:
        raise RlkError("build: operators must be named or --all, got both")
    found = {} if names else of_core()
    for operator in select.named(names) if names else select.every():
        if operator.backend(BACKEND) is not None:
            module = of_operator(operator)
            if module is not None:
                found[operator.name] = module
        elif names:
            has = ", ".join(b.name for b in operator.backends)
            raise BackendError(f'{operator.name}: backends must include "{BACKEND}", got {has}')
    return found


def _compile(modules: dict[str, Kernels], archs: Sequence[str]) -> dict[tuple[str, str], Path]:
    """Every library, by operator and architecture; compilers run side by side."""
    wanted = [(name, arch) for name in modules for arch in archs]
    done: dict[tuple[str, str], Path] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool, progress(len(wanted)) as step:
        step(0, "compiling")
        running = {pool.submit(modules[name].binary, arch): (name, arch) for name, arch in wanted}
        for future in as_completed(running):
            name, arch = running[future]
            try:
                done[name, arch] = future.result()
            except BackendError as error:
                raise BackendError(_one_sentence(str(error))) from error
            step(len(done), f"{name} {arch}")
    return done


def _one_sentence(message: str) -> str:
    """A compiler's message with its first error line alone."""
    sentence, *log = message.splitlines()
    faults = [line for line in log if re.search(r"\b(error|fatal)\b", line)]
    faults = [line for line in faults if not line.startswith("FAILED")] or log
    return " ".join([sentence, *faults[:1]])


def _row(name: str, arch: str, library: Path) -> tuple[object, ...]:
    kernels = resources(library).values()
    most = max((k.registers for k in kernels), default=0)
    spilled = sum(k.spill_stores + k.spill_loads for k in kernels)
    facts = (len(kernels), most, spilled) if kernels else (None, None, None)
    return name, arch, *facts, library
