# SPDX-License-Identifier: Apache-2.0
"""One report of all records of a folder, as Markdown and as HTML that need no other file."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markdown_it import MarkdownIt

from rlk.records import Bench, BenchRow, Document, GateSummary, Survey, SurveyRow
from rlk.report import plots, sizes, tables
from rlk.report.markdown import table

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem;
  color: #1f2937; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: 0.85em; }
th, td { border-bottom: 1px solid #e5e7eb; padding: 0.25rem 0.6rem; text-align: left; }
svg { max-width: 100%; height: auto; }
h2 { margin-top: 3rem; border-bottom: 2px solid #0f766e; }
"""


@dataclass
class Page:
    """Text with plots by the name that the text calls them."""

    lines: list[str] = field(default_factory=list)
    images: dict[str, str] = field(default_factory=dict)

    def markdown(self) -> str:
        """Markdown, plots as data."""
        text = "\n".join(self.lines)
        for name, svg in self.images.items():
            data = base64.b64encode(svg.encode()).decode()
            text = text.replace(f"]({name})", f"](data:image/svg+xml;base64,{data})")
        return text

    def html(self) -> str:
        """HTML, plots as part of it."""
        # Of what records say, nothing is markup: types in angle brackets must be seen.
        markdown = MarkdownIt("commonmark", {"html": False})
        body = markdown.enable("table").render("\n".join(self.lines))
        for name, svg in self.images.items():
            before, _, rest = body.partition(f'<img src="{name}"')
            body = before + svg + rest.partition("/>")[2]
        return (
            "<!doctype html>\n<html lang=en>\n<head><meta charset=utf-8>"
            "<meta name=viewport content='width=device-width'><title>rlk report</title>"
            f"<style>{STYLE}</style></head>\n<body>\n{body}</body>\n</html>\n"
        )


def page(records: Mapping[str, Document]) -> Page:
    """The report of records by path."""
    made = Page(["# Report of rlk\n", _origins(records)])
    summaries = [r for r in records.values() if isinstance(r, GateSummary)]
    if summaries:
        made.lines += ["## Gates\n", _gates(summaries)]
    found = [r for r in records.values() if isinstance(r, Bench | Survey)]
    devices = list(dict.fromkeys(record.origin.device for record in found))
    for name in sorted({row.operator for record in found for row in record.rows}):
        for place, device in enumerate(devices):
            # Times of two machines in one table would be nobody's.
            here = [record for record in found if record.origin.device == device]
            benches = [r for r in here if isinstance(r, Bench)]
            times = _rows_of(name, benches)
            surveys = _rows_of(name, [r for r in here if isinstance(r, Survey)])
            if times or surveys:
                several = len(devices) > 1
                made.lines.append(f"## {name} on {device}\n" if several else f"## {name}\n")
                plots_of = f"{name}-{place}" if several else name
                missing = [line for r in benches for line in sizes.left_out(r, name)]
                made.lines += _speed(made, plots_of, times, missing)
                made.lines += _values(made, plots_of, surveys)
    return made


def _rows_of(operator: str, records: Sequence[Bench | Survey]) -> list[Any]:
    return [row for record in records for row in record.rows if row.operator == operator]


def _origins(records: Mapping[str, Document]) -> str:
    rows = []
    for path, record in records.items():
        origin = record.origin
        tree = "changed since, or not known" if origin.dirty else "as committed"
        run = "interrupted" if record.interrupted else "whole"
        rows.append((path, origin.command, run, origin.device, origin.torch, origin.commit, tree))
    return table(("record", "command", "run", "device", "torch", "commit", "tree"), rows)


def _gates(summaries: Sequence[GateSummary]) -> str:
    counts: dict[tuple[str, str, str, str], dict[str, int]] = {}
    for summary in summaries:
        for row in summary.rows:
            key = (row.operator, row.backend, row.judgment, summary.origin.platform)
            found = counts.setdefault(key, {})
            found[row.status] = found.get(row.status, 0) + row.records
    statuses = ("passed", "failed", "not_run")
    rows = [(*key, *(found.get(s, 0) for s in statuses)) for key, found in counts.items()]
    columns = ("operator", "backend", "judgment", "platform", "passed", "failed", "not run")
    return table(columns, rows)


def _speed(
    made: Page, operator: str, rows: list[BenchRow], missing: Sequence[str]
) -> Iterator[str]:
    if not rows:
        yield "Speed: not run.\n"
        return
    for ours in dict.fromkeys(row.variant for row in rows if row.ours):
        yield f"`{ours}` beside the fastest other:\n"
        yield table(tables.SUMMARY, tables.summary(rows, ours))
    yield from tables.shown(tables.SPEED, tables.speed(rows))
    yield from missing
    yield from _show(made, operator, plots.of_times(rows))


def _values(made: Page, operator: str, rows: list[SurveyRow]) -> Iterator[str]:
    if not rows:
        yield "Accuracy and invariance of variants: not run.\n"
        return
    yield from tables.shown(tables.VALUES, tables.values(rows))
    yield from _show(made, operator, plots.of_values(rows))
    yield from plots.not_drawn(rows)


def _show(made: Page, operator: str, drawings: Mapping[str, str]) -> Iterator[str]:
    """Keep the plots, and call them by name."""
    for name, svg in drawings.items():
        made.images[f"{operator}-{name}.svg"] = svg
        yield f"![{plots.ALT[name]}]({operator}-{name}.svg)\n"
