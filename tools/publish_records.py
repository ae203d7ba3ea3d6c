# SPDX-License-Identifier: Apache-2.0
"""Keep what a run of ci/gpu.sh found: python tools/publish_records.py OUT_DIR docs/records/GPU

Reports of gates are counted and put together; records of survey and bench are copied. All must come
from committed sources, and from the same ones. Exit status 2, and one sentence, if they do not.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlk.errors import RlkError
from rlk.records import Bench, Document, GateSummary, Survey, load_folder, write

# One origin stands for all: what it says of the machine must be true of each.
_MACHINE = ("device", "driver", "compute_capability", "python", "torch", "triton", "cuda")


def published(records: dict[str, Document]) -> dict[str, Document]:
    """The records to keep, by file name.

    Raises:
        RlkError: there is none, or one is not of committed sources, is interrupted, or is of other
            sources or of another machine than the first.
    """
    if not records:
        raise RlkError("publish: OUT_DIR must hold records, got none")
    first = next(iter(records.values())).origin
    for path, record in records.items():
        if not record.origin.packages:
            raise RlkError(f"publish: {path} must be of sources that are committed, got none named")
        for name, source in record.origin.packages.items():
            if source.dirty is not False or source.commit is None or source.digest is None:
                raise RlkError(
                    f"publish: {path} must be of sources that are committed, got {name} at "
                    f"{source.commit} with dirty {source.dirty}; commit and run again"
                )
        if record.origin.packages != first.packages:
            raise RlkError(f"publish: {path} must be of the sources of the others, got other ones")
        for part in _MACHINE:
            ours, theirs = getattr(record.origin, part), getattr(first, part)
            if ours != theirs:
                raise RlkError(
                    f"publish: {path} must be of the machine of the others, got {part} {ours} "
                    f"beside {theirs}"
                )
        if record.interrupted:
            raise RlkError(f"publish: {path} must be of a whole run, got an interrupted one")
    gates = [r for r in records.values() if isinstance(r, GateSummary)]
    kept: dict[str, Document] = {"gates.json": together(gates)} if gates else {}
    for kind, name in ((Survey, "survey.json"), (Bench, "bench.json")):
        found = [r for r in records.values() if isinstance(r, kind)]
        if len(found) > 1:
            raise RlkError(f"publish: OUT_DIR must hold one record for {name}, got {len(found)}")
        kept |= {name: found[0]} if found else {}
    return kept


def together(gates: Sequence[GateSummary]) -> GateSummary:
    """One summary of several, which must be of one tier and seed."""
    kinds = {(summary.tier, summary.seed) for summary in gates}
    if len(kinds) > 1:
        raise RlkError(
            f"publish: reports of gates must be of one tier and seed, got {sorted(kinds)}"
        )
    return GateSummary(
        origin=gates[0].origin,
        tier=gates[0].tier,
        seed=gates[0].seed,
        passed=all(summary.passed for summary in gates),
        rows=sorted(
            (row for summary in gates for row in summary.rows),
            key=lambda row: (row.operator, row.backend, row.judgment, row.status),
        ),
    )


def main(arguments: Iterable[str]) -> int:
    """The exit status."""
    try:
        source, target = map(Path, arguments)
    except ValueError:
        print("usage: publish_records.py OUT_DIR docs/records/GPU", file=sys.stderr)
        return 2
    try:
        kept = published(load_folder(source))
        target.mkdir(parents=True, exist_ok=True)
        for name, record in kept.items():
            write(target / name, record)
            print(f"wrote {target / name}")
    except (RlkError, OSError) as error:
        print(f"publish_records.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
