# SPDX-License-Identifier: Apache-2.0
"""What the committed records say about an operator, and of which sources they are."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlk.bench.work import works
from rlk.operator import Operator
from rlk.records import (
    Bench,
    BenchRow,
    Document,
    GateSummary,
    KernelVersions,
    Origin,
    Profile,
    Survey,
    load_folder,
    load_versions,
    state,
)

# The judgments that must pass for a word; the word's own name where none is listed.
JUDGMENTS = {"batch_invariant": ("forward_invariance", "gradient_invariance")}


def short_commit(origin: Origin) -> str:
    """The commit of a record as pages show it."""
    return (origin.commit or "no commit")[:9]


@dataclass(frozen=True)
class Found:
    """What a record says of one claim or cell: `passed` or `failed`, and of which sources."""

    verdict: str
    state: str
    path: str
    origin: Origin

    @property
    def words(self) -> str:
        """As a cell of a table says it."""
        return self.verdict if self.state == "current" else f"{self.verdict}, older source"


class Evidence:
    """The records of a folder against the sources that are here."""

    def __init__(self, folder: Path, digests: Mapping[str, str | None]) -> None:
        self.records: dict[str, Document] = load_folder(folder)
        self.versions: dict[str, KernelVersions] = load_versions(folder)
        self._digests = digests

    @property
    def platforms(self) -> list[str]:
        """Those of gate records."""
        found = [r.origin.platform for r in self.records.values() if isinstance(r, GateSummary)]
        return list(dict.fromkeys(found))

    def claim(self, operator: Operator, word: str, backend: str, platform: str) -> Found | None:
        """What the newest record of all judgments behind a word says; None if there is none."""
        return self._judged(operator, backend, platform, JUDGMENTS.get(word, (word,)))

    def backend(self, operator: Operator, backend: str, platform: str) -> Found | None:
        """What the newest record says of everything that was judged."""
        return self._judged(operator, backend, platform, None)

    def bench(self, operator: Operator) -> list[tuple[str, Bench]]:
        """The records with times of an operator by path; of the current sources where there are."""
        return self._of(operator, Bench)

    def survey(self, operator: Operator) -> list[tuple[str, Survey]]:
        """The records of what variants of an operator compute, chosen as those of times."""
        return self._of(operator, Survey)

    def profile(self, operator: Operator) -> list[tuple[str, Profile]]:
        """The records of what limits the kernels of an operator, chosen as those of times."""
        return self._of(operator, Profile)

    def state(self, operator: Operator, origin: Origin) -> str:
        """`current` or `older`."""
        return state(origin, distribution(operator), self._digests)

    def _of(self, operator: Operator, kind: type) -> list[tuple[str, Any]]:
        found = [
            (path, record)
            for path, record in self.records.items()
            if isinstance(record, kind) and any(r.operator == operator.name for r in record.rows)
        ]
        current = [f for f in found if self.state(operator, f[1].origin) == "current"]
        return current or found

    def _judged(
        self, operator: Operator, backend: str, platform: str, judgments: Iterable[str] | None
    ) -> Found | None:
        answers = []
        for path, record in self.records.items():
            if not isinstance(record, GateSummary) or record.origin.platform != platform:
                continue
            rows = [
                row
                for row in record.rows
                if (row.operator, row.backend) == (operator.name, backend)
                and row.bits_version == operator.bits_version
                and (judgments is None or row.judgment in judgments)
                and row.status != "not_run"
            ]
            missing = set(judgments or ()) - {row.judgment for row in rows}
            if rows and not missing:
                passed = all(row.status == "passed" for row in rows)
                verdict = "passed" if passed else "failed"
                answers.append(
                    Found(verdict, self.state(operator, record.origin), path, record.origin)
                )
        # Of the current sources first; and among equals what failed, which nothing may hide.
        answers.sort(key=lambda found: (found.state != "current", found.verdict != "failed"))
        return answers[0] if answers else None


def at_declared_sizes(operator: Operator, rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The rows at sizes that the operator declares, or all where a record has none of them.

    A run over many numbers of rows would fill a plot that has a panel for each size.
    """
    declared = {(work.label, work.layout) for work in works(operator, torch.bfloat16, [])}
    return [row for row in rows if (row.size, row.layout) in declared] or [*rows]


def distribution(operator: Operator) -> str:
    """The distribution that an operator's package belongs to."""
    return operator.package.replace("_", "-")
