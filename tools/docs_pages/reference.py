# SPDX-License-Identifier: Apache-2.0
"""Reference pages: the command line, manifests, the support matrix, records, claims."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer

from docs_pages.evidence import Evidence, Found
from docs_pages.operator_page import NOT_RUN, cell, runs_on
from rlk.cli import app
from rlk.manifest import Manifest
from rlk.operator import CLAIM_WORDS, Operator
from rlk.records import Bench, Conventions, ExactGrad, GateSummary, Install, Profile, Survey
from rlk.report.markdown import table

# The GPU generations that users have: a column says `not run` until a record speaks for it.
GPUS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
# Refused before anything is allocated.
REFUSED = ("rocm", "npu", "musa")


def command_line(operators: Mapping[str, Operator], evidence: Evidence) -> str:
    """Every command with its arguments and options, from the program."""
    program: Any = typer.main.get_command(app)
    parts = [str(program.help)]
    for name, command in program.commands.items():
        context = typer.Context(command, info_name=f"rlk {name}")
        usage = command.get_usage(context).removeprefix("Usage: ")
        told = [
            option.get_help_record(context) for option in command.params if option.name != "help"
        ]
        rows = [(f"`{words}`", meaning) for words, meaning in filter(None, told)]
        parts += [f"\n## rlk {name}\n", f"    {usage}\n", f"{command.help}\n"]
        parts += [table(("argument", "meaning"), rows)] if rows else []
    return "\n".join(parts)


def support(operators: Mapping[str, Operator], evidence: Evidence) -> str:
    """Operator x backend x platform: what the newest gate record says."""
    platforms = ("cpu", *GPUS)
    rows = []
    for operator in operators.values():
        for backend in operator.backends:
            cells = [
                cell(evidence.backend(operator, backend.name, p), "")
                if runs_on(backend, p)
                else None
                for p in platforms
            ]
            refused = ["refused"] * len(REFUSED)
            link = f"[{operator.name}](operators/{operator.name}.md)"
            rows.append((link, backend.name, *cells, *refused))
    return table(("operator", "backend", *platforms, *REFUSED), rows)


def claims(
    operators: Mapping[str, Operator],
    evidence: Evidence,
    page: Callable[[Operator], str] = lambda operator: f"operators/{operator.name}.md",
    folder: str = "records/",
    told: Callable[[Found], str] = lambda found: found.words,
) -> str:
    """What each operator claims, and the records that judged it.

    `page` is where its page lies, `folder` where records do, and `told` how one is put in words.
    """
    words = [w for w in CLAIM_WORDS if any(o.claimed(w) for o in operators.values())]
    rows = []
    for operator in operators.values():
        cells = [
            _shown(operator, word, evidence, folder, told) if operator.claimed(word) else None
            for word in words
        ]
        rows.append((f"[{operator.name}]({page(operator)})", *cells))
    return table(("operator", *(f"`{word}`" for word in words)), rows)


def _shown(
    operator: Operator, word: str, evidence: Evidence, folder: str, told: Callable[[Found], str]
) -> str:
    """Backends by what a record says of them."""
    by_record: dict[tuple[str, str, str], list[str]] = {}
    for platform in evidence.platforms:
        for backend in operator.backends:
            found = evidence.claim(operator, word, backend.name, platform)
            if found is not None:
                by_record.setdefault((platform, told(found), found.path), []).append(backend.name)
    links = [
        f"[{words} on {platform}: {', '.join(names)}]({folder}{path})"
        for (platform, words, path), names in by_record.items()
    ]
    return "; ".join(links) or NOT_RUN


def operator_list(operators: Mapping[str, Operator], evidence: Evidence) -> str:
    """Every operator with its formula."""
    rows = [(f"[{o.name}]({o.name}.md)", f"`{o.formula}`", o.package) for o in operators.values()]
    return table(("operator", "formula", "package"), rows)


def records(operators: Mapping[str, Operator], evidence: Evidence) -> str:
    """Every record with its machine and sources."""
    kinds = {
        Bench: "speed",
        Conventions: "other conventions",
        Survey: "accuracy and invariance",
        ExactGrad: "cost of exact gradients",
        GateSummary: "gates",
        Install: "installed wheels",
        Profile: "what limits kernels",
    }
    rows = []
    for path, record in evidence.records.items():
        origin = record.origin
        names = dict.fromkeys(row.operator for row in record.rows)
        changed = {True: "changed", False: "as committed"}.get(
            origin.packages["rlk-core"].dirty, "not recorded"
        )
        commit = None if origin.commit is None else f"`{origin.commit[:9]}`"
        rows.append(
            (
                f"[{path}](../records/{path})",
                kinds[type(record)],
                ", ".join(names),
                origin.device,
                commit,
                changed,
            )
        )
    return table(("record", "about", "operators", "device", "commit", "tree"), rows)


def manifest_page(package: str, manifest: Manifest) -> str:
    """A workload manifest as a page."""
    sites = [
        (f"`{entry.name}`", site.name, site.width, site.rows_per_token, site.instances)
        for entry in manifest.operators
        for site in entry.sites
    ]
    facts: Sequence[tuple[str, object]] = [
        ("workload", manifest.workload_id),
        ("revision", f"`{manifest.model.revision}`"),
        ("execution dtypes", ", ".join(manifest.execution.dtypes)),
        ("shards of weights", manifest.weights.shard_count),
        ("boundary", manifest.provenance.boundary),
        ("sha256", f"`{manifest.sha256}`"),
    ]
    architecture = [(f"`{name}`", value) for name, value in manifest.architecture.values.items()]
    return "\n".join(
        [
            f"# {manifest.model.id}\n",
            f"What `{package}` is held against: `rlk gate --manifest` takes the file.\n",
            table(("fact", "value"), facts),
            "## Sites\n",
            table(("operator", "site", "width", "rows per token", "instances"), sites),
            "## Architecture\n",
            table(("name", "value"), architecture),
        ]
    )
