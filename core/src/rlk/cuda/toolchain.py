# SPDX-License-Identifier: Apache-2.0
"""The compiler: where it is, and the only place with its flags and architectures."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from rlk.errors import BackendError

# The binary interface between launch.py and launch.cuh: change it with either's meaning.
ABI = 1
OLDEST_NVCC = (12, 8)
# What is compiled, without running, to show that it compiles: one of each GPU generation, the
# oldest first.
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")

# wgmma is no part of sm_90, which newer GPUs would have to run too. Of its generation there is one
# compute capability, so a binary for sm_90a serves the same GPUs.
_TARGETS = {"sm_90": "sm_90a"}

_REPORT = "-Xptxas=-v,-warn-spills"
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fmad=false",
    "-ftz=false",
    "-prec-div=true",
    "-prec-sqrt=true",
    "-lineinfo",
    _REPORT,
    # One binary's symbols must not bind to those of another.
    "-Xcompiler=-fPIC,-fvisibility=hidden,-fno-gnu-unique",
)
LINK_FLAGS = ("-shared", "-Wl,--exclude-libs,ALL")
# Without nvcc: it would add an image for its default architecture.
_LIBRARIES = ("-lcudart_static", "-ldl", "-lrt", "-lpthread")
# Settings that change bits, as (name, value); nvcc accepts one or two dashes, "_" or "-".
_FORBIDDEN = {
    ("use-fast-math", ""), ("use-fast-math", "true"), ("ftz", "true"), ("prec-div", "false"),
    ("prec-sqrt", "false"), ("fmad", "true"),
}  # fmt: skip
# nvcc takes further flags from these variables.
_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")


def compile_flags(arch: str) -> tuple[str, ...]:
    """The flags of nvcc for one architecture such as sm_90."""
    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise BackendError(f"build: the architecture must be like sm_90, got {arch!r}")
    if _number(arch) < _number(ARCHITECTURES[0]):
        raise BackendError(
            f"build: the architecture must be at least {ARCHITECTURES[0]}, got {arch!r}"
        )
    target = _TARGETS.get(arch, arch)
    return (*_FLAGS, f"-gencode=arch=compute_{target.removeprefix('sm_')},code={target}")


def _number(arch: str) -> int:
    return int(re.sub(r"\D", "", arch))


def prebuilt_flags(archs: Sequence[str]) -> tuple[str, ...]:
    """The flags of nvcc for one binary that holds code for each of these, and newer GPUs' PTX.

    Without the names of files and the log of registers: neither is the same at every build.
    """
    targets = [flag for arch in archs for flag in compile_flags(arch) if "-gencode" in flag]
    newest = f"compute_{archs[-1].removeprefix('sm_')}"
    kept = [flag for flag in _FLAGS if flag not in ("-lineinfo", _REPORT)]
    return (*kept, *targets, f"-gencode=arch={newest},code={newest}")


def link_libraries(nvcc_path: str) -> tuple[str, ...]:
    """What g++ links after the objects."""
    return (f"-L{_cudart_folder(nvcc_path)}", *_LIBRARIES)


def forbidden_flags(flags: tuple[str, ...]) -> list[str]:
    """Those of these flags with which the bits would not be ours, and what is missing."""
    found = []
    for flag in flags:
        name, _, value = flag.lstrip("-").replace("_", "-").partition("=")
        if (name, value) in _FORBIDDEN:
            found.append(flag)
    return found if "-fmad=false" in flags else [*found, "no -fmad=false"]


def nvcc(operator: str) -> str:
    """The path of nvcc, from CUDA_HOME or else PATH; `operator` begins the error.

    Raises:
        BackendError: there is none, or it is too old.
    """
    lack = nvcc_missing()
    path = _find_nvcc()
    if path is None or lack is not None:
        raise BackendError(f'{operator}: backend "cuda" {lack}')
    return path


def nvcc_missing() -> str | None:
    """The end of a sentence that says how nvcc is missing, or None."""
    path = _find_nvcc()
    actual = "none" if path is None else nvcc_release(path)
    if path is not None and tuple(map(int, actual.split(".")[:2])) >= OLDEST_NVCC:
        return None
    oldest = ".".join(map(str, OLDEST_NVCC))
    return f"needs nvcc {oldest} or newer, got {actual}; set CUDA_HOME or choose another backend"


@cache
def nvcc_release(path: str) -> str:
    """The release of an nvcc, such as 13.0.88."""
    text = _output([path, "--version"])
    found = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    if found is None:
        raise BackendError(f"build: nvcc must print its release, got {text.strip()[-80:]!r}")
    return found[1]


def host_compiler() -> str:
    """The path of g++, which links and which nvcc uses for host code."""
    path = shutil.which("g++")
    if path is None:
        raise BackendError('build: backend "cuda" needs g++, got none; install it')
    return path


def ninja() -> list[str]:
    """The command that runs ninja."""
    if importlib.util.find_spec("ninja") is not None and sys.executable:
        return [sys.executable, "-m", "ninja"]
    path = shutil.which("ninja")
    if path is None:
        raise BackendError('build: backend "cuda" needs ninja, got none; install it')
    return [path]


def environment() -> dict[str, str]:
    """The environment of a build: no flags from outside, temporary files where it runs."""
    kept = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    return {**kept, "TMPDIR": "."}


def _find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=os.path.join(home, "bin") if home else None)


@cache
def _cudart_folder(path: str) -> Path:
    """The folder of libcudart_static.a, as nvcc says: it may be a wrapper."""
    text = _output([path, "--dryrun", "-cubin", "-x", "cu", os.devnull, "-o", os.devnull])
    for folder in re.findall(r'"-L([^"]+)"', text):
        if (Path(folder) / "libcudart_static.a").is_file():
            return Path(folder).resolve()
    raise BackendError('build: backend "cuda" needs libcudart_static.a, got none beside nvcc')


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment()
        )
    except OSError as error:
        raise BackendError(f"build: {command[0]} must run, got {error}") from error
    return done.stdout + done.stderr
