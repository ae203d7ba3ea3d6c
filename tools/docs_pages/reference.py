# SPDX-License-Identifier: Apache-2.0
"""Reference pages: the command line, manifests, the support matrix, records."""

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from docs_pages.evidence import Evidence
from docs_pages.operator_page import cell, runs_on
from rlk.cli import app
from rlk.manifest import Manifest
from rlk.operator import Operator
from rlk.records import Bench, Conventions, ExactGrad, GateSummary, Install, Profile, Survey
from rlk.report.markdown import table

# The GPU generations that users have: a column says `not run` until a record speaks for it.
GPUS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


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
            link = f"[{operator.name}](operators/{operator.name}.md)"
            rows.append((link, backend.name, *cells))
    return table(("operator", "backend", *platforms), rows)


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
                record.tier if isinstance(record, GateSummary) else None,
                "all" if operators.keys() <= names.keys() else ", ".join(names),
                origin.device,
                commit,
                changed,
            )
        )
    for path, versions in evidence.versions.items():
        names = ", ".join(dict.fromkeys(row.operator for row in versions.rows))
        link = f"[{path}](../records/{path})"
        rows.append((link, "versions of kernels", None, names, versions.device, None, "by hand"))
    return table(("record", "about", "tier", "operators", "device", "commit", "tree"), rows)


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
