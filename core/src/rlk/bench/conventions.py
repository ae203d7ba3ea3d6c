# SPDX-License-Identifier: Apache-2.0
"""`python -m rlk.bench.conventions [OP...] [--rows N] [--seeds N] [--json FILE]`.

How many elements functions of other libraries round otherwise than ours: bits, not times. Beside
PEERS an operator's prior_art.py may hold CONVENTIONS, peers that round in other places, and
ROUNDINGS, our own functions by the name of their rounding.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlk.arguments import dtype_name
from rlk.bench.variants import Call, Peer, prior_art
from rlk.cli import select
from rlk.cli.console import complain
from rlk.compare import raw_bits
from rlk.errors import RlkError
from rlk.gates.inputs import default_scalars, fixture, label, without_rows
from rlk.operator import Operator
from rlk.parts import tensors_in
from rlk.records import ConventionRow, Conventions, Origin, origin, write

METHOD = "elements of the first output whose bits differ"
DTYPE = "bfloat16"
# 512 rows for each of 40 seeds: half a million elements and more of the narrowest rows.
ROWS, SEEDS = 512, 40

Batch = Sequence[torch.Tensor]


def differences(ours: Call, other: Call, batches: Sequence[Batch]) -> dict[str, Any]:
    """Elements of the first output that differ, per million, and batches in which any does."""
    differing = elements = seeds = 0
    for batch in batches:
        with torch.no_grad():
            ours_first, other_first = (tensors_in(call(*batch))[0] for call in (ours, other))
        if (ours_first.shape, ours_first.dtype) != (other_first.shape, other_first.dtype):
            looks = [f"{dtype_name(t.dtype)} {list(t.shape)}" for t in (ours_first, other_first)]
            raise RlkError(f"conventions: results must be alike, got {' and '.join(looks)}")
        count = int((raw_bits(ours_first) != raw_bits(other_first)).sum())
        differing, elements = differing + count, elements + ours_first.numel()
        seeds += count > 0
    return {"ppm": differing / elements * 1e6, "seeds": seeds, "of": len(batches)}


def compared(operator: Operator, device: str, rows: int, seeds: int) -> Iterator[ConventionRow]:
    """One row for each size, rounding of ours and other function; none where none is named."""
    found = prior_art(operator)
    roundings: Mapping[str, Call] = getattr(found, "ROUNDINGS", {})
    if not roundings:
        # Before inputs are made: so many whole samples would fill the memory.
        return
    free = {s.name for s in operator.free_scalars}
    scalars = {n: v for n, v in default_scalars(operator).items() if n in free}
    peers = (*getattr(found, "PEERS", ()), *getattr(found, "CONVENTIONS", ()))
    for sizes in {
        label(s): s for s in (without_rows(w.sizes) for w in operator.workloads)
    }.values():
        batches = [_batch(operator, sizes, device, rows, seed) for seed in range(seeds)]
        for rounding, ours in roundings.items():
            for peer in peers:
                yield ConventionRow(
                    operator=operator.name,
                    size=f"{rows} rows of {label(sizes)}",
                    dtype=DTYPE,
                    rounding=rounding,
                    other=peer.name,
                    version=peer.version() or "",
                    **_measured(ours, peer, scalars, batches),
                )


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m rlk.bench.conventions", description=__doc__)
    parser.add_argument("operators", nargs="*", metavar="OP", help="all if none")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--json", type=Path, help="file for the record")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        operators = select.named(options.operators) if options.operators else select.every()
        rows = []
        for operator in operators:
            for row in compared(operator, device, options.rows, options.seeds):
                print(_line(row), flush=True)
                rows.append(row)
        if options.json is not None:
            write(options.json, Conventions(origin=_origin(options), method=METHOD, rows=rows))
    except RlkError as error:
        complain(str(error))
        return 2
    return 0


def _origin(options: argparse.Namespace) -> Origin:
    told = [*options.operators, "--rows", str(options.rows), "--seeds", str(options.seeds)]
    return origin(command=" ".join(["python -m rlk.bench.conventions", *told]))


def _batch(
    operator: Operator, sizes: Mapping[str, int], device: str, rows: int, seed: int
) -> list[torch.Tensor]:
    made = fixture(operator, DTYPE, rows=rows, sizes=sizes, seed=seed)
    return [made.inputs[t.name].to(device) for t in operator.inputs]


def _measured(
    ours: Call, peer: Peer, scalars: Mapping[str, Any], batches: Sequence[Batch]
) -> dict[str, Any]:
    if peer.version() is None:
        return {"missing": "not installed"}
    try:
        return differences(ours, peer.make(scalars), batches)
    except Exception as error:  # noqa: BLE001 - what cannot run here says so in its row
        return {"missing": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}


def _line(row: ConventionRow) -> str:
    head = f"{row.operator}, {row.size}, {row.rounding}: {row.other} {row.version}"
    if row.missing is not None:
        return f"{head}: not run, {row.missing}"
    return f"{head}: {row.ppm:.1f} ppm, {row.seeds} of {row.of} seeds"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
