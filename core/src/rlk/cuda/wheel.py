# SPDX-License-Identifier: Apache-2.0
"""Binaries for a wheel: what the build hook of a distribution (hatch_build.py) calls."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rlk.cuda import build, kernels, prebuilt, sources, toolchain
from rlk.errors import BackendError

VARIABLE = "RLK_CUDA_ARCHS"
# The licence of the CUDA runtime, which every binary holds.
EULA = Path(__file__).with_name("NVIDIA_CUDA_EULA.txt")


@dataclass(frozen=True)
class Binaries:
    """What a wheel takes in: files by their path in it, its platform, and the compiler."""

    files: dict[Path, str]
    platform: str
    nvcc: str


def requested_archs(text: str) -> tuple[str, ...]:
    """What RLK_CUDA_ARCHS names, the oldest first; "all" is one GPU of each generation.

    Raises:
        BackendError: one is no architecture, or serves no more than one chip.
    """
    names = toolchain.ARCHITECTURES if text == "all" else tuple(re.split(r"[\s,;]+", text.strip()))
    for name in names:
        if not re.fullmatch(r"sm_\d{2,3}", name):
            raise BackendError(f"build: {VARIABLE} must be all or names like sm_90, got {text!r}")
    return tuple(sorted(set(names), key=prebuilt.capability))


def compile_package(package: str, archs: tuple[str, ...], into: Path) -> Binaries:
    """Compile every CUDA source of an importable package for a wheel.

    Args:
        package: such as rlk_rope, or rlk.
        archs: as `requested_archs` gives.
        into: an empty folder, which holds the files until the wheel is written.
    Raises:
        BackendError: there is no nvcc, no CUDA source, or one does not compile.
    """
    lack = toolchain.nvcc_missing()
    if lack is not None:
        wanted = lack.partition(";")[0]
        raise BackendError(f"build: {VARIABLE} {wanted}; set CUDA_HOME, or unset {VARIABLE}")
    found = kernels.of_package(package)
    if not found:
        raise BackendError(f"build: {package} must declare a CUDA source, got none")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(lambda one: _compile(one, archs, into), found))
    files = {file: f"{package}/{place}/{file.name}" for entry, place in made for file in entry}
    libraries = [file for file in files if file.suffix == ".so"]
    return Binaries(files, _platform(libraries), toolchain.nvcc_release(toolchain.nvcc("build")))


def _compile(
    one: kernels.Kernels, archs: tuple[str, ...], into: Path
) -> tuple[tuple[Path, Path], str]:
    """(library and manifest, their folder below the package)"""
    name, source = kernels.name_of(one), one.source
    flags = toolchain.prebuilt_flags(archs)
    digest = sources.digest(source, name, one.generated, flags)
    root = sources.include_roots(source)[-1]
    relative = source.absolute().relative_to(root)
    folder = into / name
    folder.mkdir()
    library, manifest = folder / f"{name}.so", folder / sources.MANIFEST
    with _fixed_folder(digest) as work:
        for key, text in sources.included(source, one.generated).items():
            written = work / (relative if key == source.name else key)
            written.parent.mkdir(parents=True, exist_ok=True)
            written.write_text(text)
        # Threads change the order of the work, not the result.
        command = [toolchain.nvcc(name), "-ccbin", toolchain.host_compiler(), "-I."]
        command += [*flags, f"--threads={len(archs)}"]
        rules = build.ninja_rules(command, work / relative, f"{name}.so", ("-s",))
        (work / "build.ninja").write_text(rules)
        build.run([*toolchain.ninja(), "--quiet"], work, source)
        shutil.copyfile(work / f"{name}.so", library)
    facts = {
        "sources": digest,
        "digest": hashlib.sha256(library.read_bytes()).hexdigest(),
        "flags": flags,
        "archs": archs,
        "nvcc": toolchain.nvcc_release(toolchain.nvcc(name)),
    }
    manifest.write_text(json.dumps(facts, indent=1) + "\n")
    return (library, manifest), f"{Path(*relative.parts[1:-1])}/{prebuilt.FOLDER}/{name}"


@contextlib.contextmanager
def _fixed_folder(digest: str) -> Iterator[Path]:
    """An empty folder whose path the sources fix: nvcc makes it a part of symbols' names.

    Of this user alone, so that nobody else puts anything there; builds of the same wait in turn.
    """
    folder = Path("/tmp") / f"rlk-wheel-{digest[:32]}"
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise BackendError(f"build: {folder} must be a folder of this user, got another's")
        try:
            lock = open(folder / "lock", "w")
        except FileNotFoundError:  # removed since
            continue
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is(lock, folder / "lock"):  # who held it before has removed the folder
                continue
            try:
                work = folder / "work"
                shutil.rmtree(work, ignore_errors=True)  # left by a killed build
                work.mkdir()
                yield work
                return
            finally:
                shutil.rmtree(folder, ignore_errors=True)


def _is(file: TextIO, path: Path) -> bool:
    """Whether an open file is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _platform(libraries: list[Path]) -> str:
    """The platform tag: the oldest glibc that has every symbol that the libraries need."""
    command = ["objdump", "-T", *map(str, libraries)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = [tuple(map(int, pair)) for pair in re.findall(r"\bGLIBC_(\d+)\.(\d+)", shown)]
    major, minor = max(needed)
    return f"manylinux_{major}_{minor}_{os.uname().machine}"
