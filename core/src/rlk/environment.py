# SPDX-License-Identifier: Apache-2.0
"""The environment a result was made in: versions, device, sources, observed arithmetic."""

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
from fnmatch import fnmatch
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import torch

import rlk
from rlk import interpreter
from rlk.registry import ENTRY_POINT_GROUP

# A package of nightly builds carries the second name.
_TRITON_PACKAGES = ("triton", "pytorch-triton")
# What decides a result: sources, and the data they read. Tests, pages and the commands that only
# arrange and show results decide none, and not all of them are installed; kernels that a wheel
# brings compiled are checked against these sources.
_DECISIVE = {".py", ".cu", ".cuh", ".json"}
_INDECISIVE = (
    *("test_*", "conftest.py", "planted_faults", "cli", "report", "records"),
    *("prebuilt", "__pycache__"),
)
# 256: a side that every matrix library hands to tensor cores where it may.
_SIDE = 256


def facts() -> dict[str, Any]:
    """What a report says about its machine and process.

    Versions and sources are read from what is imported; the arithmetic is observed by computing
    on the device, whatever the settings say.

    Returns:
        JSON data; None where the machine has no such thing.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a subclass of str, which encoders refuse
        "triton": _triton_version(),
        "triton_interpreter": interpreter.is_enabled(),
        "cuda": torch.version.cuda,
        "packages": _packages(),
        "device": _device_name(device),
        "device_count": torch.cuda.device_count(),
        "compute_capability": _capability(device),
        "driver": _driver(device),
        "threads": torch.get_num_threads(),
        "tf32": not _matmul_keeps_float32(device),
        "flush_denormal": _flushes_subnormals(device),
        "fast_math": not _divides_correctly(device),
    }


def _packages() -> dict[str, dict[str, Any]]:
    """Version and source of core and of every operator package, by distribution."""
    found = {"rlk-core": {"version": rlk.__version__, **_source(_folder("rlk"))}}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.dist is not None:
            source = _source(_folder(entry.value))
            found[entry.dist.name] = {"version": entry.dist.version, **source}
    return found


def digests() -> dict[str, str | None]:
    """The digest of core and of every operator package, by distribution.

    Returns:
        SHA-256 of the files that decide results; None where they cannot be read.
    """
    return {name: package["digest"] for name, package in _packages().items()}


def digest(folder: Path) -> str:
    """SHA-256 of the names and contents of a package's files that decide results.

    Args:
        folder: of the package.
    Returns:
        The digest, in hexadecimal digits: equal for a checkout and for what it installs.
    """
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).as_posix()):
        parts = path.relative_to(folder).parts
        decisive = path.suffix in _DECISIVE and not any(
            fnmatch(part, pattern) for part in parts for pattern in _INDECISIVE
        )
        if decisive and path.is_file():
            found.update(f"{'/'.join(parts)}\0{path.stat().st_size}\0".encode())
            found.update(path.read_bytes())
    return found.hexdigest()


def _folder(package: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package)
    except ImportError:
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


@cache
def _source(folder: Path | None) -> dict[str, Any]:
    """Commit of the checkout that tracks a package, whether files differ from it, and the digest.

    An installed package may lie inside somebody else's checkout, which does not track it.
    """
    nothing: dict[str, Any] = {"commit": None, "dirty": None, "digest": None}
    if folder is not None:
        nothing["digest"] = digest(folder)
    if folder is None or git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return nothing
    commit = git(folder, "rev-parse", "--verify", "HEAD")
    changes = git(folder, "status", "--porcelain")
    return nothing if commit is None else {**nothing, "commit": commit, "dirty": bool(changes)}


def git(folder: Path, *arguments: str) -> str | None:
    """What git says of the checkout that a folder lies in, or None where there is none."""
    return _output("git", "--no-optional-locks", "-C", str(folder), *arguments)


def _output(program: str, *arguments: str) -> str | None:
    """What a program prints, or None if it is absent or fails."""
    path = shutil.which(program)
    if path is None:
        return None
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _triton_version() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return None
    for package in _TRITON_PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "unknown"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if os.path.exists("/proc/cpuinfo"):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _capability(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    return ".".join(map(str, torch.cuda.get_device_capability(device)))


def _driver(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    lines = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return lines.splitlines()[0] if lines else None


def _matmul_keeps_float32(device: torch.device) -> bool:
    # TF32 and BF16 have no bit for 2^-12 beside 1.
    value = 1.0 + 2.0**-12
    options: dict[str, Any] = {"dtype": torch.float32, "device": device}
    product = torch.full((_SIDE, _SIDE), value, **options) @ torch.eye(_SIDE, **options)
    return bool((product == value).all())


def _flushes_subnormals(device: torch.device) -> bool:
    smallest_normal = torch.full((_SIDE,), 2.0**-126, dtype=torch.float32, device=device)
    return not bool((smallest_normal * 0.5 > 0).all())


def _divides_correctly(device: torch.device) -> bool:
    """Whether FP32 quotients are the rounded FP64 ones; fast-math builds multiply by 1/b.

    FP64 has more than twice the significand of FP32 plus two bits, so its quotient rounds to
    FP32 as the exact one would.
    """
    a = torch.arange(1, _SIDE * _SIDE + 1, device=device, dtype=torch.float32)
    b = a.flip(0)
    return torch.equal(a / b, (a.double() / b.double()).float())
