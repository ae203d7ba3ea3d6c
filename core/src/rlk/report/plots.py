# SPDX-License-Identifier: Apache-2.0
"""Plots of records as SVG text: the same records give the same bytes."""

import io
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from rlk.records import FLOOR, BenchRow, SurveyRow
from rlk.report.sizes import grouped, without_rows

Axes: TypeAlias = Any

# Ours in greens, others in the order in which they come.
OURS = {"cuda": "#0f766e", "triton": "#14b8a6", "golden": "#86b8a8"}
PEERS = ("#c2410c", "#7c3aed", "#2563eb", "#a16207", "#be185d", "#475569", "#0891b2", "#65a30d")
DARK = "#111827"
# Inches: a column of the site, and what one bar and one panel need.
_WIDTH, _BAR, _PANEL = 8.0, 0.24, 2.6
# Letters of a line of a size beside its bar.
_LABEL = 44
_STYLE = {
    "svg.hashsalt": "rlk",
    "svg.fonttype": "none",  # text stays text: readable, searchable, small
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.0,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "text.parse_math": False,  # names are not formulas
}

# An error that is small beside its tensor may be many ulp of an element that is tiny.
ULP_LABEL = "ulp of each element from the correctly rounded value; a tiny one may be many off"

# What a plot shows, for whoever does not see it.
ALT = {
    "peers": "times of every variant in multiples of the floor",
    "roofline": "bandwidth of every variant under that of the probe",
    "rows": "time over the number of rows",
    "differing": "rows whose bits differ alone",
    "ulp": "elements by ulp from the correctly rounded value",
}


class Plain(LogFormatter):
    """Ticks of a log axis as plain numbers: with formulas off, those of matplotlib are markup."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """The label of a tick, empty where its neighbours leave no room."""
        return f"{x:g}" if super().__call__(x, pos) else ""


def of_times(
    rows: Sequence[BenchRow], one_by_one: Sequence[BenchRow] | None = None
) -> dict[str, str]:
    """The plots that there are of times, by name.

    Args:
        rows: of one operator.
        one_by_one: those whose sizes are drawn one by one; all if none.
    """
    each = rows if one_by_one is None else one_by_one
    drawings = {
        "peers": against_peers(each),
        "roofline": roofline(each),
        "rows": time_per_rows(rows),
    }
    return {name: svg for name, svg in drawings.items() if svg is not None}


def of_values(rows: Sequence[SurveyRow]) -> dict[str, str]:
    """The plots that there are of invariance and accuracy, by name."""
    drawings = {"differing": differing_rows(rows), "ulp": ulp_histograms(rows)}
    return {name: svg for name, svg in drawings.items() if svg is not None}


def against_peers(rows: Sequence[BenchRow]) -> str:
    """Forward and forward+backward of every variant at every size, in multiples of the floor."""
    sizes = grouped(rows, lambda row: (row.size, row.layout, row.dtype))
    colours = _colours(rows)

    def draw(axes: Axes, key: tuple[str, ...], found: list[BenchRow]) -> None:
        measured = [row for row in found if row.both_ratio is not None]
        for place, row in enumerate(reversed(measured)):
            forward, both = row.forward_ratio or 0.0, row.both_ratio or 0.0
            colour = colours[row.variant]
            axes.barh(place + 0.2, forward, 0.36, color=colour, alpha=0.45)
            axes.barh(place - 0.2, both, 0.36, color=colour)
            axes.text(both, place - 0.2, f" {both:g}", va="center", fontsize=7)
        axes.set_yticks(range(len(measured)), [row.variant for row in reversed(measured)])
        axes.axvline(1.0, color=DARK, linewidth=1.0, linestyle=":")
        axes.set_title(" ".join(key))

    heights = [
        _BAR * 2.2 * max(2, sum(r.both_ratio is not None for r in f)) for f in sizes.values()
    ]
    return _panels(
        sizes, draw, heights, "times the floor; pale: forward, full: forward and backward"
    )


def time_per_rows(rows: Sequence[BenchRow]) -> str | None:
    """Forward and backward over the number of rows; None unless a size has two counts."""
    timed = [row for row in rows if row.rows and row.both_us is not None]
    pairs = grouped(
        zip(without_rows(timed), timed, strict=True),
        lambda pair: (pair[0], pair[1].layout, pair[1].dtype),
    )
    groups = {key: [row for _, row in found] for key, found in pairs.items()}
    groups = {key: found for key, found in groups.items() if len({r.rows for r in found}) > 1}
    if not groups:
        return None
    colours = _colours(rows)

    def draw(axes: Axes, key: tuple[str, ...], found: list[BenchRow]) -> None:
        for name, points in grouped(found, lambda row: row.variant).items():
            points.sort(key=lambda row: row.rows or 0)
            style = {"color": DARK, "linestyle": ":"} if name == FLOOR else {}
            style = {"color": colours.get(name, DARK), **style}
            xs, ys = [row.rows for row in points], [row.both_us for row in points]
            axes.plot(xs, ys, marker="o", markersize=3, linewidth=1.2, label=name, **style)
        _log(axes, "x")
        _log(axes, "y")
        axes.set_ylabel("us")
        axes.set_title(" ".join(key))

    return _panels(groups, draw, [_PANEL] * len(groups), "rows; forward and backward")


def roofline(rows: Sequence[BenchRow]) -> str | None:
    """Bandwidth that each variant reaches in forward, under what the probe reaches."""
    floors = {
        (row.size, row.layout, row.dtype): row.terabytes_per_second["forward"]
        for row in rows
        if row.variant == FLOOR and "forward" in row.terabytes_per_second
    }
    if not floors:
        return None
    colours = _colours(rows)
    names = [textwrap.fill(" ".join(key[:2]), _LABEL) for key in floors]
    with mpl.rc_context(_STYLE):
        height = max(_PANEL, 0.42 * len(floors) + 0.9)
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        axes = figure.subplots()
        for place, (key, ceiling) in enumerate(floors.items()):
            axes.plot([ceiling, ceiling], [place - 0.35, place + 0.35], color=DARK, linewidth=2.0)
            for row in rows:
                if (row.size, row.layout, row.dtype) == key and row.forward_ratio:
                    reached = ceiling / row.forward_ratio
                    axes.plot(reached, place, "o", color=colours[row.variant], label=row.variant)
        axes.set_yticks(range(len(floors)), names)
        axes.invert_yaxis()
        axes.set_xlim(left=0.0)
        axes.set_xlabel("TB/s in forward; the line is what moving the bytes alone reaches")
        _legend(figure)
        return _svg(figure)


def differing_rows(rows: Sequence[SurveyRow]) -> str | None:
    """The share of rows whose bits differ alone from those in their batch, by tensor."""
    groups = {k: found for k, found in _judged_alone(rows).items() if _differ(found)}
    colours = _colours(rows)

    def draw(axes: Axes, key: tuple[str, ...], found: list[SurveyRow]) -> None:
        tensors = list(dict.fromkeys(name for row in found for name in row.rows_alone))
        labels = [f"{row.variant}: {name}" for row in found for name in tensors]
        shares = [
            (row, 100.0 * row.rows_alone.get(name, 0) / (row.rows_judged or 1))
            for row in found
            for name in tensors
        ]
        for place, (row, share) in enumerate(reversed(shares)):
            axes.barh(place, share, 0.7, color=colours[row.variant])
            axes.text(share, place, f" {share:g}", va="center", fontsize=7)
        axes.set_yticks(range(len(labels)), labels[::-1], fontsize=7)
        axes.set_xlim(0.0, 105.0)
        axes.set_title(" ".join(key))

    if not groups:
        return None
    heights = [
        _BAR * 0.75 * max(4, sum(len(row.rows_alone) for row in found)) for found in groups.values()
    ]
    return _panels(groups, draw, heights, "per cent of rows whose bits differ alone")


def not_drawn(rows: Sequence[SurveyRow]) -> Iterator[str]:
    """Sentences on what the plots of values leave out."""
    equal = [" ".join(k) for k, found in _judged_alone(rows).items() if not _differ(found)]
    if equal:
        yield f"No variant has a row whose bits differ alone at {', '.join(equal)}: no panel.\n"
    known = dict.fromkeys(row.size for row in rows if row.accuracy)
    if len(known) > 1:
        drawn = widest(rows)[0].size
        yield f"Ulp are drawn at {drawn}, the size with most elements.\n"


def widest(rows: Sequence[SurveyRow]) -> list[SurveyRow]:
    """The rows with accuracy at the size with most elements."""
    sizes = grouped([row for row in rows if row.accuracy], lambda row: row.size)
    most = {s: max(a.elements for r in f for a in r.accuracy.values()) for s, f in sizes.items()}
    return sizes[max(most, key=lambda size: most[size])] if sizes else []


def _judged_alone(rows: Sequence[SurveyRow]) -> dict[Any, list[SurveyRow]]:
    found = [row for row in rows if row.rows_judged and row.rows_alone]
    return grouped(found, lambda row: (row.size, row.dtype))


def _differ(rows: Sequence[SurveyRow]) -> bool:
    return any(count for row in rows for count in row.rows_alone.values())


def ulp_histograms(rows: Sequence[SurveyRow]) -> str | None:
    """How many elements are how many ulp away from the correctly rounded one, by tensor.

    Of the size with most elements: those of others look alike, and would fill pages.
    """
    found = widest(rows)
    if not found:
        return None
    groups = grouped(
        [(row, name) for row in found for name in row.accuracy],
        lambda pair: (pair[1], pair[0].size, pair[0].dtype),
    )
    colours = _colours(rows)

    def draw(axes: Axes, key: tuple[str, ...], pairs: list[tuple[SurveyRow, str]]) -> None:
        found = {b for row, n in pairs for b in row.accuracy[n].ulp_histogram}
        bins = sorted(found, key=lambda label: int(label.partition("-")[0]))
        width = 0.8 / len(pairs)
        for index, (row, name) in enumerate(pairs):
            accuracy = row.accuracy[name]
            shares = [accuracy.ulp_histogram.get(b, 0) / accuracy.elements for b in bins]
            places = [place + (index - len(pairs) / 2 + 0.5) * width for place in range(len(bins))]
            axes.bar(places, shares, width, color=colours[row.variant], label=row.variant)
        axes.set_xticks(range(len(bins)), bins, rotation=45 if len(bins) > 8 else 0)
        _log(axes, "y")
        axes.set_ylabel("share")
        axes.set_title(" ".join(key))

    return _panels(groups, draw, [_PANEL * 0.8] * len(groups), ULP_LABEL)


def _log(axes: Axes, name: str) -> None:
    """Make an axis logarithmic."""
    axes.set(**{f"{name}scale": "log"})
    axis = getattr(axes, f"{name}axis")
    axis.set_major_formatter(Plain())
    axis.set_minor_formatter(Plain(minor_thresholds=(1, 0.4)))


def _panels(
    groups: dict[Any, list[Any]],
    draw: Callable[[Axes, Any, list[Any]], None],
    heights: Sequence[float],
    label: str,
) -> str:
    """One panel above the other for each group."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, sum(heights) + 0.6 * len(groups)), layout="constrained")
        many = figure.subplots(len(groups), 1, squeeze=False, height_ratios=list(heights))
        for (axes,), (key, found) in zip(many, groups.items(), strict=True):
            draw(axes, key, found)
        many[-1][0].set_xlabel(label)
        _legend(figure)
        return _svg(figure)


def _legend(figure: Figure) -> None:
    """One legend for all panels, below them; none where nothing is labelled."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    if found:
        figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=4)


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    # Without a date: what did not change is the same file.
    figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _colours(rows: Iterable[BenchRow] | Iterable[SurveyRow]) -> dict[str, str]:
    """A colour for each variant."""
    names = dict.fromkeys(row.variant for row in rows if row.variant != FLOOR)
    others = [name for name in names if name not in OURS]
    return {**OURS, **{name: PEERS[i % len(PEERS)] for i, name in enumerate(others)}}
