# SPDX-License-Identifier: Apache-2.0
"""Binaries that a wheel brings: one beside each CUDA source, for several GPU generations.

    <folder of the source>/prebuilt/<name>/{<name>.so, manifest.json}

wheel.py makes them. One serves only the sources that it was compiled from: of another version of
core or of the package it is passed over, and so is one for other GPUs or a newer driver.
"""

import ctypes
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rlk.cuda import sources, toolchain

FOLDER = "prebuilt"


def examine(
    source: Path, name: str, generated: Mapping[str, str], arch: str | None
) -> tuple[Path | None, str]:
    """The binary for a GPU and what it holds, or None and why there is none.

    Args:
        source, name, generated: as for `build.build`.
        arch: such as sm_90; None asks for any GPU.
    """
    library = source.parent / FOLDER / name / f"{name}.so"
    if not library.parent.is_dir():
        return None, "this installation brings none"
    try:
        manifest = json.loads(library.with_name(sources.MANIFEST).read_text())
        archs, release = tuple(map(str, manifest["archs"])), str(manifest["nvcc"])
        stated = [str(manifest[part]) for part in ("sources", "digest")]
        intact = hashlib.sha256(library.read_bytes()).hexdigest() == stated[1]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"it is damaged ({type(error).__name__}: {error}); install the wheel again"
    if not intact:
        return None, "it is damaged (other bytes than were compiled); install the wheel again"
    flags = toolchain.prebuilt_flags(archs)
    if stated[0] != sources.digest(source, name, generated, flags):
        return None, "it was compiled from other sources than are installed"
    holds = f"code for {', '.join(archs)} and newer, by nvcc {release}"
    if arch is not None and not fits(arch, archs):
        return None, f"it holds {holds}, not for {arch}"
    driver = driver_version()
    if driver is not None and driver // 1000 < int(release.split(".")[0]):
        wanted, actual = release.split(".")[0], f"{driver // 1000}.{driver % 1000 // 10}"
        return None, f"it needs a driver for CUDA {wanted}, got one for {actual}"
    return library, f"holds {holds}"


def fits(arch: str, archs: tuple[str, ...]) -> bool:
    """Whether a GPU runs code for one of `archs`, or the PTX of the newest of them.

    Machine code runs on GPUs of its generation that are as new; PTX on every newer one.
    """
    major, minor = capability(arch)
    held = [capability(one) for one in archs]
    return any(m == major and n <= minor for m, n in held) or (major, minor) >= max(held)


def capability(arch: str) -> tuple[int, int]:
    """(9, 0) of sm_90."""
    number = int(re.sub(r"\D", "", arch))
    return number // 10, number % 10


@cache
def driver_version() -> int | None:
    """The newest CUDA that the driver runs, such as 13000, or None without a driver."""
    version = ctypes.c_int()
    try:
        failed: Any = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value
