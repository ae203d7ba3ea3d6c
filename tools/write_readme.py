# SPDX-License-Identifier: Apache-2.0
"""Write what the README takes from records: `hatch run docs:readme` after records have changed.

Between `<!-- rlk:begin claims -->` and its end stands the table of claims, between
`<!-- rlk:begin plot OPERATOR -->` and its end a plot, in docs/, with the record it was drawn from.
Which records are of the current sources is said by the site alone: a commit then changes nothing
here. A test compares.
"""

import re
import sys
from collections.abc import Mapping

from docs_pages import claims
from docs_pages.errors import StageError
from docs_pages.evidence import Evidence, at_declared_sizes, distribution, short_commit
from docs_stage import ROOT

from rlk import environment, registry
from rlk.operator import Operator
from rlk.report import plots

_PART = re.compile(r"(<!-- rlk:begin (\S+)(?: (\S+))? -->\n).*?(<!-- rlk:end \2 -->)", re.DOTALL)
RECORDS = "docs/records/"


def written(
    text: str, operators: Mapping[str, Operator], evidence: Evidence
) -> tuple[str, dict[str, str]]:
    """The README, and its plots by path.

    Raises:
        StageError: a part is none of the two, or a plot has no record.
    """
    images: dict[str, str] = {}

    def filled(match: re.Match[str]) -> str:
        begin, part, name, end = match.groups()
        if part == "claims":
            content = claims.overview(operators, evidence, _page, RECORDS, lambda f: f.verdict)
        elif part == "plot" and name in operators:
            content = _plot(operators[name], evidence, images)
        else:
            raise StageError(f"README.md: {begin.strip()} must be claims or plot OPERATOR")
        return f"{begin}{content}{end}"

    return _PART.sub(filled, text), images


def _page(operator: Operator) -> str:
    folder = f"packages/{distribution(operator)}/src/{operator.package}"
    return f"{folder}/{operator.name}/page.md"


def _plot(operator: Operator, evidence: Evidence, images: dict[str, str]) -> str:
    for path, record in evidence.bench(operator):
        rows = [row for row in record.rows if row.operator == operator.name]
        name = f"docs/{operator.name}-peers.svg"
        images[name] = plots.against_peers(at_declared_sizes(operator, rows))
        words = f"{operator.name}, times of each variant in multiples of the floor"
        origin = record.origin
        facts = f"{origin.device}, torch {origin.torch}, at {short_commit(origin)}"
        ours = dict.fromkeys(f"`{row.variant}`" for row in rows if row.ours)
        return (
            f"![{words}]({name})\n\n[Record]({RECORDS}{path}): {facts}. "
            f"Ours, in green: {', '.join(ours)}.\n"
        )
    raise StageError(f"README.md: a plot of {operator.name} must have a record, got none")


def main() -> int:
    """The exit status."""
    evidence = Evidence(ROOT / RECORDS, environment.digests())
    readme = ROOT / "README.md"
    try:
        text, images = written(
            readme.read_text(), dict(sorted(registry.operators().items())), evidence
        )
    except StageError as error:
        print(f"write_readme.py: {error}", file=sys.stderr)
        return 1
    readme.write_text(text)
    for name, svg in images.items():
        (ROOT / name).write_text(svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
