# SPDX-License-Identifier: Apache-2.0
"""What was measured of one operator: a summary first, full tables folded, plots."""

from collections.abc import Iterator, Mapping, Sequence

from docs_pages.claims import NOT_RUN
from docs_pages.evidence import Evidence, at_declared_sizes, short_commit
from rlk.operator import Operator
from rlk.records import Bench, BenchRow, Origin, SurveyRow
from rlk.report import plots, sizes, tables
from rlk.report.markdown import table

LEGEND = "[What the columns say](../guides/benchmark.md#columns).\n"


def measured(operator: Operator, evidence: Evidence) -> tuple[str, dict[str, str]]:
    """The section of a page, and its plots by file name."""
    parts, images = ["## Measured\n", LEGEND], {}
    for title, found in (
        ("### Speed\n", list(_speed(operator, evidence, images))),
        ("### Accuracy and invariance\n", list(_values(operator, evidence, images))),
    ):
        parts += [title, *(found or [f"{NOT_RUN.capitalize()}.\n"])]
    limits = list(_limits(operator, evidence))
    parts += ["### What limits the kernels\n", *limits] if limits else []
    return "\n".join(parts), images


def folded(title: str, lines: Sequence[str]) -> Iterator[str]:
    """Lines that a reader opens; nothing for none."""
    if lines:
        yield f'<details markdown="1">\n<summary>{title}</summary>\n'
        yield from lines
        yield "</details>\n"


def _speed(operator: Operator, evidence: Evidence, images: dict[str, str]) -> Iterator[str]:
    everything: list[BenchRow] = []
    for path, record in evidence.bench(operator):
        yield source(record.origin, path, evidence.state(operator, record.origin))
        yield from _times(operator, record)
        everything += [row for row in record.rows if row.operator == operator.name]
    if everything:
        drawn = [row for row in everything if is_drawn(operator, row)]
        drawings = plots.of_times(drawn, at_declared_sizes(operator, drawn))
        yield from _images(operator, drawings, images)


def _times(operator: Operator, record: Bench) -> Iterator[str]:
    """Ours as a call gets it beside the fastest other, and everybody in tables that are folded."""
    rows, missing = tables.absent([row for row in record.rows if row.operator == operator.name])
    ours = next(b.name for b in operator.backends if "nvidia" in b.platforms)
    kind = tables.shared(rows)
    every = f"; every size is {kind}" if kind else ""
    yield f"Ours is `{ours}`, which a call without a backend gets first{every}.\n"
    lines = table(tables.SUMMARY, tables.summary(rows, ours))
    yield f'<div class="summary" markdown="1">\n\n{lines}\n</div>\n'
    yield from sizes.left_out(record, operator.name)
    full = tables.speed(rows)
    yield from folded(
        f"Every variant at each of {len(full)} sizes", [*tables.shown(tables.SPEED, full)]
    )
    yield from [missing] if missing else []


def is_drawn(operator: Operator, row: BenchRow) -> bool:
    """Not what torch.compile makes of a product in FP32: it is no peer of one in BF16."""
    product = operator.reduces_by("mma_chain")
    return not (product and row.variant.startswith("torch.compile"))


def _values(operator: Operator, evidence: Evidence, images: dict[str, str]) -> Iterator[str]:
    # A GPU's come first; those of a CPU are folded then, and not drawn.
    found = sorted(evidence.survey(operator), key=lambda f: f[1].origin.platform == "cpu")
    drawn: list[SurveyRow] = []
    for path, record in found:
        of_operator = [row for row in record.rows if row.operator == operator.name]
        rows, missing = tables.absent(of_operator)
        yield source(record.origin, path, evidence.state(operator, record.origin))
        if drawn and record.origin.platform == "cpu":
            yield from folded("Tables of this CPU", [*_shown(rows), *filter(None, [missing])])
            continue
        widest = {row.size for row in plots.widest(rows)}
        yield from _shown([row for row in rows if row.size in widest])
        others = [*_shown([row for row in rows if row.size not in widest])]
        yield from folded("Every variant at further sizes", others)
        yield from [missing] if missing else []
        drawn += rows
    if drawn:
        yield from _images(operator, plots.of_values(drawn), images)
        yield from plots.not_drawn(drawn)


def _shown(rows: Sequence[SurveyRow]) -> Iterator[str]:
    return tables.shown(tables.VALUES, tables.values(rows))


def _limits(operator: Operator, evidence: Evidence) -> Iterator[str]:
    for path, record in evidence.profile(operator):
        rows = [row for row in record.rows if row.operator == operator.name]
        yield source(record.origin, path, evidence.state(operator, record.origin))
        tool = "Nsight Compute" if record.ncu is None else f"Nsight Compute {record.ncu}"
        yield f"{tool}: {record.method}.\n"
        yield from tables.shown(tables.LIMITS, tables.limits(rows))


def _images(
    operator: Operator, drawings: Mapping[str, str], images: dict[str, str]
) -> Iterator[str]:
    for name, svg in drawings.items():
        images[f"{operator.name}-{name}.svg"] = svg
        yield f"![{plots.ALT[name]}]({operator.name}-{name}.svg){{ .plot }}\n"


def source(origin: Origin, path: str, state: str) -> str:
    """The line that names a record and its sources, on a page in a folder of the site."""
    commit = f"commit `{short_commit(origin)}`" if origin.commit else short_commit(origin)
    age = "the current source" if state == "current" else "**an older source**"
    versions = [f"torch {origin.torch}", f"triton {origin.triton}" if origin.triton else ""]
    facts: Sequence[str] = [origin.device, *filter(None, versions), commit, age]
    return f"[Record](../records/{path}): {', '.join(facts)}.\n"
