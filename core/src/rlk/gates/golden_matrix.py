# SPDX-License-Identifier: Apache-2.0
"""Digests of golden over a matrix of shapes, data and scalars: what every GPU is held against.

    python -m rlk.gates.golden_matrix PACKAGE [--jobs N] [OP...]

writes golden_matrix.json into the folders of a package's operators. One digest covers a tensor
over every kind of data and row count of one dtype, row length and choice of scalars.
"""

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch

from rlk import registry
from rlk.compare import raw_bits
from rlk.execution import Execution
from rlk.gates import golden_hashes
from rlk.gates.candidate import placed
from rlk.gates.inputs import (
    VALUES,
    Fixture,
    default_scalars,
    edge_sizes,
    fixture,
    forty_decades,
    smallest_sizes,
)
from rlk.operator import Operator

FILE_NAME = "golden_matrix.json"
# Around the lanes, halves and chunks of a row sum, and the row lengths of models.
LENGTHS = (1, 3, 127, 128, 129, 256, 1000, 2048, 3072, 5120)
ROWS = (1, 7, 33, 257)
# 65537: the longest row promised, one over 256 chunks of 256.
LONGEST = 65537
LONGEST_ROWS = (1, 7)
SEED = 11
# The kinds of the gates, with wider decades.
DATA = {**VALUES, "decades": forty_decades}

# The results of one call by name, y or dx or the exact state of dweight.
Run = Callable[[Fixture], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Cell:
    """What is computed together: all data and scalars of one dtype and size of a row."""

    operator: Operator
    dtype: str
    sizes: Mapping[str, int]

    @property
    def key(self) -> str:
        """The beginning of its keys in the file."""
        return f"{self.dtype}/{'x'.join(map(str, self.sizes.values()))}"


def cells(operator: Operator) -> list[Cell]:
    """The whole matrix, longest rows first so that parallel workers finish together."""
    every = edge_sizes(operator, (*LENGTHS, LONGEST))
    if len(every[0]) > 1:
        every.append(smallest_sizes(operator))
    every.sort(key=lambda sizes: prod(sizes.values()), reverse=True)
    return [Cell(operator, dtype, sizes) for sizes in every for dtype in operator.inputs[0].dtype]


def batches(cell: Cell) -> Iterator[Fixture]:
    """The inputs of a cell: every kind of data and row count, scalars at their defaults."""
    counts = LONGEST_ROWS if LONGEST in cell.sizes.values() else ROWS
    for place, (rows, kind) in enumerate(product(counts, DATA)):
        # Every other batch has parameters in FP32, as beside BF16 rows in training.
        mixed = place % 2 == 1 and any("float32" in t.dtype for t in cell.operator.parameters)
        batch = fixture(
            cell.operator,
            cell.dtype,
            rows=rows,
            sizes=cell.sizes,
            seed=SEED + place,
            values=DATA[kind],
            parameter_dtype="float32" if mixed else None,
        )
        for parameter in cell.operator.parameters:
            batch.inputs[parameter.name][::5] = -0.0
        yield batch


def variants(operator: Operator) -> dict[str, dict[str, Any]]:
    """Every combination of the scalars' judged values, by a name."""
    values: dict[str, tuple[float | str, ...]] = {
        # A number that is 0 by default is absent then: that and one other value are two paths, as
        # are those of a flag.
        s.name: s.choices or (s.default, *(s.also[:1] if s.default in (0, True) else ()))
        for s in operator.free_scalars
    }
    varied = [name for name, several in values.items() if len(several) > 1]
    found = {}
    for chosen in product(*(values[name] for name in varied)):
        named = dict(zip(varied, chosen, strict=True))
        label = ",".join(f"{name}={value}" for name, value in named.items())
        found[label or "default"] = {**default_scalars(operator), **named}
    return found


def on_backend(operator: Operator, backend: str, device: torch.device | str = "cpu") -> Run:
    """What runs one call forward and backward: results, exact states and their roundings."""
    execution = Execution(operator)

    def run(batch: Fixture) -> dict[str, torch.Tensor]:
        tensors = [placed(t, torch.device(device)) for t in batch.inputs.values()]
        upstream = [placed(t, torch.device(device)) for t in batch.upstream.values()]
        scalars = tuple(batch.scalars.values())
        results = execution.forward(*tensors, *scalars, backend)
        needs = [True for _ in operator.returned_gradients]
        saved = results[len(operator.outputs) :]
        kept = operator.kept(tensors, results[: len(operator.outputs)])
        gradients = execution.backward(*upstream, *kept, *saved, *scalars, *needs, backend)
        names = [t.name for t in operator.outputs + operator.saved]
        named = dict(zip(names, results, strict=True))
        for declared, gradient in zip(operator.returned_gradients, gradients, strict=True):
            named[f"d{declared.name}"] = gradient
            if declared.gradient == "parameter":
                dtype = batch.inputs[declared.name].dtype
                named[f"d{declared.name}"] = execution.round_state(gradient, dtype, backend)
                named[f"d{declared.name}_state"] = gradient
        return named

    return run


def digests(cell: Cell, run: Run) -> dict[str, str]:
    """The digests of a cell by dtype/length/scalars/tensor."""
    made = list(batches(cell))
    found: dict[str, str] = {}
    for label, scalars in variants(cell.operator).items():
        sums: dict[str, Any] = {}
        for batch in made:
            for name, tensor in run(replace(batch, scalars=scalars)).items():
                head = f"{tensor.dtype} {list(tensor.shape)}\n".encode()
                total = sums.setdefault(name, hashlib.sha256())
                total.update(head + raw_bits(tensor).numpy().tobytes())
        found |= {f"{cell.key}/{label}/{name}": s.hexdigest() for name, s in sums.items()}
    return found


def golden_digests(cell: Cell) -> dict[str, str]:
    """The digests of golden on the CPU."""
    return digests(cell, on_backend(cell.operator, "golden"))


def path(operator: Operator) -> Path:
    """Where the digests of an operator are kept."""
    return golden_hashes.path(operator).with_name(FILE_NAME)


def load(operator: Operator) -> dict[str, Any]:
    """The recorded document: operator, bits_version, digests."""
    return json.loads(path(operator).read_text())


def write(operator: Operator, found: Mapping[str, str]) -> None:
    """Record digests."""
    content = {
        "operator": operator.name,
        "bits_version": operator.bits_version,
        "digests": dict(sorted(found.items())),
    }
    path(operator).write_text(json.dumps(content, indent=0) + "\n")


def _golden_of(package: str, name: str, place: int) -> dict[str, str]:
    """One cell, found again by its place: declarations do not travel between processes."""
    torch.set_num_threads(1)
    operator = next(o for o in registry.declared_in(package) if o.name == name)
    return golden_digests(cells(operator)[place])


def _main() -> None:
    parser = argparse.ArgumentParser(description="Record golden's digests over the matrix.")
    parser.add_argument("package")
    parser.add_argument("operators", nargs="*", metavar="OP")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    for operator in registry.declared_in(options.package):
        if operator.name in (options.operators or [operator.name]):
            places = range(len(cells(operator)))
            with ProcessPoolExecutor(options.jobs) as pool:
                jobs = [pool.submit(_golden_of, options.package, operator.name, p) for p in places]
                found = {key: value for job in jobs for key, value in job.result().items()}
            write(operator, found)
            print(f"{path(operator)}: {len(found)} digests", flush=True)


if __name__ == "__main__":
    _main()
