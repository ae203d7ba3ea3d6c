# SPDX-License-Identifier: Apache-2.0
"""Golden hashes of an operator: the witness of its bits, kept in its folder.

They are produced on the CPU and compared on any machine. A hash may change only together with
the operator's `bits_version`.
"""

import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from rlk.compare import digest
from rlk.errors import RlkError
from rlk.execution import Execution
from rlk.gates.candidate import Candidate
from rlk.gates.inputs import (
    VALUES,
    Fixture,
    default_scalars,
    edge_sizes,
    fixture,
    label,
    scalar_variants,
    smallest_sizes,
)
from rlk.operator import Operator

FILE_NAME = "golden_hashes.json"
SEED = 7
ROWS = 33
# Less than a chunk of 256, one and a bit, and several: every step of a row sum shows.
LENGTHS = (1, 257, 1000)


class GoldenHashes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Digests by dtype/config/tensor, for one bits version."""

    operator: str
    bits_version: int
    hashes: dict[str, str]


def has_golden(operator: Operator) -> bool:
    """Whether golden has the operator's bits, so that hashes can witness them."""
    return operator.backend("golden") is not None


def inputs(operator: Operator, dtype: str) -> Iterator[tuple[str, Fixture]]:
    """The fixed inputs that are hashed: every kind of value, every scalar, several lengths."""
    real = smallest_sizes(operator)

    def batch(sizes: Mapping[str, int] = real, **options: Any) -> Fixture:
        return fixture(operator, dtype, rows=ROWS, sizes=sizes, seed=SEED, **options)

    for kind, values in VALUES.items():
        yield kind, batch(values=values)
    for name, scalars in scalar_variants(operator).items():
        if scalars != default_scalars(operator):
            yield name, batch(scalars=scalars)
    for sizes in edge_sizes(operator, LENGTHS):
        yield label(sizes), batch(sizes)
    if any("float32" in t.dtype for t in operator.parameters):
        yield "float32_parameters", batch(parameter_dtype="float32")


def compute(operator: Operator) -> dict[str, str]:
    """The digests of golden, on the CPU."""
    golden = Candidate(Execution(operator), "golden", torch.device("cpu"))
    return {
        f"{dtype}/{config}/{name}": digest(tensor)
        for dtype in operator.inputs[0].dtype
        for config, batch in inputs(operator, dtype)
        for name, tensor in golden.run_fixture(batch).tensors.items()
    }


def path(operator: Operator) -> Path:
    """Where the operator's hashes are kept: the folder that holds its oracle."""
    folder = importlib.import_module(operator.oracle.__module__).__file__
    return Path(folder or "").parent / FILE_NAME


def load(operator: Operator) -> GoldenHashes:
    """The recorded hashes.

    Raises:
        RlkError: there are none, or the file is unreadable or malformed.
    """
    file = path(operator)
    try:
        return msgspec.json.decode(file.read_bytes(), type=GoldenHashes)
    except FileNotFoundError:
        raise RlkError(
            f"{operator.name}: golden hashes must be recorded in {file.name}, got no such file; "
            f"run rlk bits --write {operator.name}"
        ) from None
    except OSError as error:
        raise RlkError(
            f"{operator.name}: {file.name} must be readable, got {error.strerror}"
        ) from error
    except msgspec.DecodeError as error:
        raise RlkError(f"{operator.name}: {file.name} must be valid, got {error}") from error


def version_fault(operator: Operator, recorded: GoldenHashes) -> str | None:
    """What is wrong with the version of the recorded hashes, if anything."""
    if recorded.bits_version == operator.bits_version:
        return None
    return (
        f"hashes are of bits version {recorded.bits_version}, "
        f"declared is {operator.bits_version}; run rlk bits --write {operator.name}"
    )


def stale(operator: Operator) -> str | None:
    """Why the recorded hashes do not witness golden's bits, or None."""
    recorded = load(operator)
    fault = version_fault(operator, recorded)
    if fault is None and recorded.hashes != compute(operator):
        fault = (
            f"bits changed under bits version {operator.bits_version}; raise bits_version, say "
            "why in the changelog, and record the hashes again"
        )
    return fault


def write(operator: Operator) -> Path:
    """Record the hashes of a new bits version.

    Raises:
        RlkError: bits changed without a new bits version.
    """
    file = path(operator)
    found = compute(operator)
    if file.exists():
        recorded = load(operator)
        # Further inputs may join at any time; what was recorded before must still hold.
        changed = any(found.get(key, hash) != hash for key, hash in recorded.hashes.items())
        if recorded.bits_version == operator.bits_version and changed:
            raise RlkError(
                f"{operator.name}: bits_version must rise when bits change, got "
                f"{operator.bits_version} again; raise it in operator.py"
            )
    content = {
        "operator": operator.name,
        "bits_version": operator.bits_version,
        "hashes": dict(sorted(found.items())),
    }
    file.write_text(json.dumps(content, indent=1) + "\n")
    return file
