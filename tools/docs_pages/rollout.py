# SPDX-License-Identifier: Apache-2.0
"""What records say of rollout engines, and of libraries that round in other places."""

from collections.abc import Mapping

from docs_pages.claims import NOT_RUN
from docs_pages.evidence import Evidence
from docs_pages.operator_page import cell
from rlk.operator import Operator
from rlk.records import ConventionRow, Conventions
from rlk.report.markdown import table

# From the pages of guides.
ROOT = "../"


def engines(operators: Mapping[str, Operator], evidence: Evidence) -> str:
    """Who claims an engine's bits, and the records that judged it."""
    rows = []
    for operator in operators.values():
        for backend in operator.backends if operator.claimed("rollout_equal") else ():
            judged = (
                (p, evidence.claim(operator, "rollout_equal", backend.name, p))
                for p in evidence.platforms
            )
            told = [f"{cell(found, ROOT)} on {p}" for p, found in judged if found is not None]
            link = f"[{operator.name}]({ROOT}operators/{operator.name}.md)"
            rows.append((link, backend.name, "; ".join(told) or NOT_RUN))
    return table(("operator", "backend", "`rollout_equal`"), rows)


def conventions(operators: Mapping[str, Operator], evidence: Evidence) -> str:
    """How far other libraries are: a table for each record."""
    parts = []
    for path, record in evidence.records.items():
        if isinstance(record, Conventions):
            known = [operators[n] for n in _operators(record) if n in operators]
            states = {evidence.state(operator, record.origin) for operator in known}
            older = "" if states == {"current"} else ", older source"
            facts = f"{record.origin.device}, torch {record.origin.torch}{older}"
            parts += [f"**[{facts}]({ROOT}records/{path})**\n", _counted(record)]
    return "\n".join(parts) or f"{NOT_RUN}\n"


def _operators(record: Conventions) -> list[str]:
    return [*dict.fromkeys(row.operator for row in record.rows)]


def _counted(record: Conventions) -> str:
    """A line for each function, a column for each rounding of ours."""
    roundings = dict.fromkeys(row.rounding for row in record.rows)
    found: dict[tuple[str, str, str], dict[str, ConventionRow]] = {}
    for row in record.rows:
        other = f"{row.other} ({row.version})" if row.version else row.other
        found.setdefault((row.operator, row.size, other), {})[row.rounding] = row
    lines = [(*key, *(_told(rows.get(r)) for r in roundings)) for key, rows in found.items()]
    return table(("operator", "size", "other", *(f"`{r}`" for r in roundings)), lines)


def _told(row: ConventionRow | None) -> str | None:
    if row is None:
        return None
    return NOT_RUN if row.ppm is None else f"{row.ppm:g} ppm, {row.seeds} of {row.of}"
