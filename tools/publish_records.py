# SPDX-License-Identifier: Apache-2.0
"""Keep what runs of ci/gpu.sh found: python tools/publish_records.py OUT_DIR docs/records/GPU

Reports of gates are counted and put together; so are records of survey, and of bench, that share
operators, dtypes or variants among them: who was not there in one run may be in another. A run of
bench that was cut off leaves whole sizes: the operator at which it was cut off has a file of its
own, which says so; nothing else may be of an interrupted run.

All must come from committed sources, and from the same ones, be it at two commits: a machine that
had them without their history is believed if they have the digests of this checkout, in which
nothing but records and pages may have changed. Exit status 2, and one sentence, if they do not.
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from compare_records import KEYS
from msgspec.structs import replace

from rlk.environment import git
from rlk.errors import RlkError
from rlk.records import (
    Bench,
    Conventions,
    Document,
    ExactGrad,
    GateSummary,
    Install,
    Profile,
    Source,
    Survey,
    load_folder,
    origin,
    write,
)
from rlk.records.document import MACHINE

Rows = TypeVar("Rows", Bench, Survey)
ROOT = Path(__file__).resolve().parents[1]
# What publishing itself changes: no source.
SHOWN = ("docs", "README.md")
# Kinds of which a run leaves one record, and the file that keeps it.
SINGLE: dict[type[Document], str] = {
    Conventions: "conventions.json",
    ExactGrad: "exact_grad.json",
    Install: "install.json",
    Profile: "profile.json",
}
# What a command says of where it ran alone.
_OF_THE_MACHINE = re.compile(r" --(?:json|jobs)[ =]\S+")
# The verdict on who was not there.
ABSENT = "not applicable"


def published(records: dict[str, Document]) -> dict[str, Document]:
    """The records to keep, by file name.

    Raises:
        RlkError: there is none, or one is not of committed sources, is interrupted and of no
            benchmark, or is of other sources or of another machine than the first.
    """
    if not records:
        raise RlkError("publish: OUT_DIR must hold records, got none")
    here = sources_here()
    records = {path: with_commit(record, here) for path, record in records.items()}
    first = next(iter(records.values()))
    for path, record in records.items():
        if not record.origin.packages:
            raise RlkError(f"publish: {path} must be of sources that are committed, got none named")
        for name, source in record.origin.packages.items():
            if source.dirty is not False or source.commit is None or source.digest is None:
                raise RlkError(
                    f"publish: {path} must be of sources that are committed, got {name} at "
                    f"{source.commit} with dirty {source.dirty}; commit and run again"
                )
        # Commits between them may have changed what is no source.
        if digests_of(record) != digests_of(first):
            raise RlkError(f"publish: {path} must be of the sources of the others, got other ones")
        # One origin stands for all: what it says of the machine must be true of each.
        for part in MACHINE:
            ours, theirs = getattr(record.origin, part), getattr(first.origin, part)
            if ours != theirs:
                raise RlkError(
                    f"publish: {path} must be of the machine of the others, got {part} {ours} "
                    f"beside {theirs}"
                )
        if record.interrupted and not isinstance(record, Bench):
            raise RlkError(f"publish: {path} must be of a whole run, got an interrupted one")
    gates = [r for r in records.values() if isinstance(r, GateSummary)]
    kept: dict[str, Document] = {"gates.json": together(gates)} if gates else {}
    surveys = [r for r in records.values() if isinstance(r, Survey)]
    kept |= {"survey.json": joined("rlk survey", surveys)} if surveys else {}
    kept |= measured({path: r for path, r in records.items() if isinstance(r, Bench)})
    for kind, name in SINGLE.items():
        found = [r for r in records.values() if isinstance(r, kind)]
        if len(found) > 1:
            raise RlkError(f"publish: OUT_DIR must hold one record for {name}, got {len(found)}")
        kept |= {name: found[0]} if found else {}
    return kept


def measured(benches: Mapping[str, Bench]) -> dict[str, Document]:
    """Records of bench, by file name: whole runs as one, and where each other one was cut off.

    Raises:
        RlkError: as `joined`, or an interrupted run has measured nothing, or two were cut off at
            one operator.
    """
    kept: dict[str, Document] = {}
    whole = []
    for path, record in benches.items():
        if record.interrupted and not record.rows:
            raise RlkError(f"publish: {path}, interrupted, must hold a row, got none")
        # A size is recorded when it is whole, and so are the operators before the last.
        last = record.rows[-1].operator if record.interrupted else None
        cut = [row for row in record.rows if row.operator == last]
        name = f"bench-{last}.json"
        if name in kept:
            raise RlkError(f"publish: {path} must not be cut off at {last}, as another record is")
        if cut:
            kept[name] = replace(record, rows=cut)
        before = [row for row in record.rows if row.operator != last]
        if before:
            whole.append(replace(record, interrupted=False, rows=before))
    if benches:
        # What two runs have measured is refused, cut off or not.
        joined("rlk bench", list(benches.values()))
    if whole:
        kept["bench.json"] = joined("rlk bench", whole)
    return kept


def digests_of(record: Document) -> dict[str, str | None]:
    """The digest of each package whose sources a record is of."""
    return {name: source.digest for name, source in record.origin.packages.items()}


def sources_here() -> dict[str, Source]:
    """The sources of this checkout; records and pages that have changed make them no other ones."""
    packages = origin().packages
    besides = [f":(exclude){path}" for path in SHOWN]
    changed = git(ROOT, "status", "--porcelain", "--", ".", *besides)
    head = git(ROOT, "rev-parse", "HEAD")
    if changed != "":
        return packages
    return {
        name: replace(source, dirty=False) if source.commit == head else source
        for name, source in packages.items()
    }


def with_commit(record: Document, here: Mapping[str, Source]) -> Document:
    """A record whose sources have the commit of equal ones here.

    Those without a commit of their own, and those of this commit beside other changes: the digest
    says that none of these was one of sources.

    Args:
        record: of any machine.
        here: the sources of this checkout, by distribution.
    """

    def known(name: str, source: Source) -> Source:
        mine = here.get(name)
        if mine is None or mine.dirty is not False or source.commit not in (None, mine.commit):
            return source
        equal = source.digest is not None and source.digest == mine.digest
        return replace(source, commit=mine.commit, dirty=False) if equal else source

    packages = {name: known(name, source) for name, source in record.origin.packages.items()}
    return replace(record, origin=replace(record.origin, packages=packages))


def joined(command: str, records: Sequence[Rows]) -> Rows:
    """One record of several that share operators, dtypes or variants among them.

    Raises:
        RlkError: they were made in unlike ways, or two of them have tried the same.
    """
    if len(records) == 1:
        return records[0]
    ways = {r.method if isinstance(r, Bench) else f"seed {r.seed}" for r in records}
    if len(ways) > 1:
        raise RlkError(f"publish: records of {command} must be made in one way, got {sorted(ways)}")
    keys = KEYS[str(records[0].__struct_config__.tag)]
    rows: dict[tuple[str, ...], Any] = {}
    for row in (row for record in records for row in record.rows):
        key = tuple(str(getattr(row, name)) for name in keys)
        if row.verdict == ABSENT and key in rows:
            continue
        if key in rows and rows[key].verdict != ABSENT:
            raise RlkError(
                f"publish: {command} must have measured {' '.join(key)} once, got two records"
            )
        rows[key] = row
    told = all_of(command, [record.origin.command for record in records])
    return replace(
        records[0], origin=replace(records[0].origin, command=told), rows=list(rows.values())
    )


def all_of(command: str, runs: Iterable[str]) -> str:
    """The commands of runs, those of equal options as one: pages read there what was asked for."""
    operators: dict[str, dict[str, None]] = {}
    for run in "; ".join(runs).split("; "):
        names, dash, options = run.removeprefix(command).partition(" --")
        kept = _OF_THE_MACHINE.sub("", dash + options)
        operators.setdefault(kept, {}).update(dict.fromkeys(names.split()))
    return "; ".join(" ".join([command, *names]) + kept for kept, names in operators.items())


def together(gates: Sequence[GateSummary]) -> GateSummary:
    """One summary of several.

    Raises:
        RlkError: they are not of one tier and seed, or two have judged the same.
    """
    kinds = {(summary.tier, summary.seed) for summary in gates}
    if len(kinds) > 1:
        raise RlkError(
            f"publish: reports of gates must be of one tier and seed, got {sorted(kinds)}"
        )
    judged: set[tuple[str, ...]] = set()
    for summary in gates:
        here = {(row.operator, row.backend, row.judgment) for row in summary.rows}
        for operator, backend, judgment in sorted(here & judged):
            raise RlkError(
                f"publish: reports of gates must have judged {operator} on {backend} by {judgment} "
                "once, got two"
            )
        judged |= here
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
