# SPDX-License-Identifier: Apache-2.0
"""Keep what runs of ci/gpu.sh found: python tools/publish_records.py OUT_DIR docs/records/GPU

Reports of gates are counted and put together; so are records of survey, and of bench, that share
the operators among them. All must come from committed sources, and from the same ones: a machine
that had them without their history is believed if they have the digests of this clean checkout.
Exit status 2, and one sentence, if they do not.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from rlk.errors import RlkError
from rlk.records import (
    Bench,
    Document,
    GateSummary,
    Install,
    Source,
    Survey,
    load_folder,
    origin,
    write,
)
from rlk.records.document import MACHINE

Rows = TypeVar("Rows", Bench, Survey)


def published(records: dict[str, Document]) -> dict[str, Document]:
    """The records to keep, by file name.

    Raises:
        RlkError: there is none, or one is not of committed sources, is interrupted, or is of other
            sources or of another machine than the first.
    """
    if not records:
        raise RlkError("publish: OUT_DIR must hold records, got none")
    here = origin().packages
    records = {path: with_commit(record, here) for path, record in records.items()}
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
        # One origin stands for all: what it says of the machine must be true of each.
        for part in MACHINE:
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
    surveys = [r for r in records.values() if isinstance(r, Survey)]
    kept |= {"survey.json": joined("rlk survey", surveys)} if surveys else {}
    benches = [r for r in records.values() if isinstance(r, Bench)]
    kept |= {"bench.json": joined("rlk bench", benches)} if benches else {}
    installs = [r for r in records.values() if isinstance(r, Install)]
    if len(installs) > 1:
        raise RlkError(f"publish: OUT_DIR must hold one run of wheels, got {len(installs)}")
    kept |= {"install.json": installs[0]} if installs else {}
    return kept


def with_commit(record: Document, here: Mapping[str, Source]) -> Document:
    """A record whose sources, without a commit of their own, have that of equal ones here.

    Args:
        record: of any machine.
        here: the sources of this checkout, by distribution.
    """

    def known(name: str, source: Source) -> Source:
        mine = here.get(name)
        if source.commit is not None or mine is None or mine.dirty is not False:
            return source
        equal = source.digest is not None and source.digest == mine.digest
        return replace(source, commit=mine.commit, dirty=False) if equal else source

    packages = {name: known(name, source) for name, source in record.origin.packages.items()}
    return replace(record, origin=replace(record.origin, packages=packages))


def joined(command: str, records: Sequence[Rows]) -> Rows:
    """One record of several that share the operators among them.

    Raises:
        RlkError: they were made in unlike ways, or two of them have an operator.
    """
    if len(records) == 1:
        return records[0]
    ways = {r.method if isinstance(r, Bench) else f"seed {r.seed}" for r in records}
    if len(ways) > 1:
        raise RlkError(f"publish: records of {command} must be made in one way, got {sorted(ways)}")
    operators = [name for r in records for name in dict.fromkeys(row.operator for row in r.rows)]
    twice = next((name for name in operators if operators.count(name) > 1), None)
    if twice is not None:
        raise RlkError(f"publish: {command} must have measured {twice} once, got two records")
    made = replace(records[0].origin, command=" ".join([command, *operators]))
    return replace(records[0], origin=made, rows=[row for r in records for row in r.rows])


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
