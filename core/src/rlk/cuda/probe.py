# SPDX-License-Identifier: Apache-2.0
"""Whether a binary computes on a device as IEEE 754 says: asked once, remembered on disk.

launch.cuh compiles a probe kernel into every binary, with the flags of that binary.
"""

import contextlib
import ctypes
import hashlib
import json
import math
import os
import struct
import tempfile
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from rlk.cuda import build
from rlk.cuda.library import Library
from rlk.errors import BackendError, PlatformError

# The order of the cases in probe_kernel of launch.cuh.
OPERATIONS = (
    "add", "mul", "mul_add", "div", "sqrt", "add_rn", "mul_rn", "fma_rn", "div_rn", "sqrt_rn",
)  # fmt: skip
# kProbeCases of launch.cuh.
CAPACITY = 96

_PRIMES = (1, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53)


@dataclass(frozen=True)
class Case:
    """One operation on FP32 values, and its correctly rounded result."""

    subject: str
    operation: str
    a: float
    b: float
    c: float
    expected: float


def cases() -> tuple[Case, ...]:
    """What the probe computes; FP64 values that FP32 represents, or rounds once."""
    found = []
    for suffix in ("", "_rn"):
        found += [
            Case("subnormals", "add" + suffix, 2.0**-149, 2.0**-149, 0.0, 2.0**-148),
            Case("subnormals", "mul" + suffix, 2.0**-126, 0.5, 0.0, 2.0**-127),
            Case("subnormals", "mul" + suffix, 2.0**-149, 1.0, 0.0, 2.0**-149),
            Case("subnormals", "div" + suffix, 2.0**-126, 2.0, 0.0, 2.0**-127),
            Case("subnormals", "sqrt" + suffix, 2.0**-148, 0.0, 0.0, 2.0**-74),
        ]
        # The FP64 quotient and root of small integers round to FP32 as the exact ones would.
        found += [
            Case("division", "div" + suffix, a, b, 0.0, a / b)
            for a, b in zip(_PRIMES, _PRIMES[1:], strict=False)
        ]
        found += [
            Case("square root", "sqrt" + suffix, a, 0.0, 0.0, math.sqrt(a)) for a in _PRIMES[1:]
        ]
    for step in (2.0**-12, 2.0**-23):
        # (1 + s)^2 = 1 + 2s + s^2, and a product rounded to FP32 loses s^2.
        root, rest = 1.0 + step, -(1.0 + 2.0 * step)
        found.append(Case("separate roundings", "mul_add", root, root, rest, 0.0))
        found.append(Case("fused roundings", "fma_rn", root, root, rest, step * step))
    found.append(Case("subnormals", "fma_rn", 2.0**-74, 2.0**-75, 0.0, 2.0**-149))
    return tuple(found)


def require(library: Library, device: int) -> None:
    """Raise unless this binary keeps IEEE arithmetic on this device.

    Raises:
        PlatformError: it does not.
        BackendError: the probe cannot run.
    """
    file = _verdict_file(library, device)
    failed = _remembered(file, library)
    if failed is None:
        failed = run(library, device)
        _remember(file, library, failed)
    if failed:
        raise PlatformError(
            f"{library.operator}: {torch.cuda.get_device_name(device)} must compute "
            f"{', '.join(failed)} as IEEE 754 says, got other bits; choose another backend"
        )


def run(library: Library, device: int) -> list[str]:
    """The subjects that the device got wrong; safe while a stream is being captured."""
    asked = cases()
    questions = b"".join(
        struct.pack("ifff", OPERATIONS.index(c.operation), c.a, c.b, c.c) for c in asked
    )
    questions = questions.ljust(CAPACITY * struct.calcsize("ifff"), b"\0")
    answers = ctypes.create_string_buffer(CAPACITY * 4)
    probe = library.function("rlk_probe", [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p])
    library.check(probe(device, questions, answers), "the strict-math probe")
    wrong = [
        case.subject
        for index, case in enumerate(asked)
        if answers.raw[4 * index : 4 * index + 4] != struct.pack("f", case.expected)
    ]
    return list(dict.fromkeys(wrong))


def _verdict_file(library: Library, device: int) -> Path | None:
    """In the cache, one for each binary, kind of device and driver; None where there is no home."""
    try:
        folder = build.cache_folder()
    except BackendError:
        return None
    driver = library.function("rlk_driver_version", [])()
    capability = torch.cuda.get_device_capability(device)
    facts = [torch.cuda.get_device_name(device), capability, driver]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return folder / f"strict-math-{library.digest[:16]}-{digest[:16]}.json"


def _identity(library: Library) -> dict[str, str]:
    """What a verdict is about."""
    asked = json.dumps([astuple(c) for c in cases()])
    return {"binary": library.digest, "cases": hashlib.sha256(asked.encode()).hexdigest()}


def _remembered(file: Path | None, library: Library) -> list[str] | None:
    if file is None:
        return None
    try:
        verdict = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    known = isinstance(verdict, dict) and isinstance(verdict.get("failed"), list)
    failed = verdict.pop("failed") if known else []
    return failed if known and verdict == _identity(library) else None


def _remember(file: Path | None, library: Library, failed: list[str]) -> None:
    """Write the verdict in one step; a cache that is read-only is asked again next time."""
    if file is None:
        return
    text = json.dumps({**_identity(library), "failed": failed})
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".strict-math-", dir=file.parent)
        with os.fdopen(descriptor, "w") as temporary:
            temporary.write(text)
        os.replace(name, file)
