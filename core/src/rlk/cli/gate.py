# SPDX-License-Identifier: Apache-2.0
"""`rlk gate`: judge the claims of operators, and leave a report."""

import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rlk import environment, gates
from rlk.cli import report_file, select
from rlk.cli.console import console, progress
from rlk.cli.gate_summary import conclusion, failures, judged_nothing, judgments
from rlk.errors import RlkError, one_of
from rlk.gates.case import DEFAULT_SEED
from rlk.gates.record import Workload
from rlk.gates.workers import judged
from rlk.manifest import load_manifest
from rlk.operator import Operator
from rlk.survey.peers import JUDGMENTS as PEER_JUDGMENTS
from rlk.survey.peers import held_to


class Tier(StrEnum):
    """How large a matrix of configurations is judged."""

    short = "short"
    full = "full"


def gate(
    operators: Annotated[
        list[str] | None, typer.Argument(metavar="[OP]...", help="Names of operators.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Judge every operator.")] = False,
    tier: Annotated[Tier, typer.Option(help="Size of the matrix.")] = Tier.short,
    backend: Annotated[
        str | None, typer.Option(help="Judge this backend only; or another library, by its name.")
    ] = None,
    manifest: Annotated[
        Path | None, typer.Option(help="Judge the operators of this workload manifest.")
    ] = None,
    case: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Judge one OPERATOR/BACKEND/JUDGMENT/DTYPE."),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=select.MAX_SEED, help="Seed of the inputs.")
    ] = DEFAULT_SEED,
    dump: Annotated[
        Path | None, typer.Option(help="Folder for the tensors of failing comparisons.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="File for the JSON report.")] = None,
    jobs: Annotated[
        int, typer.Option(min=0, help="Processes that judge; 0 is one for each processor.")
    ] = 1,
) -> None:
    """Judge what operators claim; exit status 0 passed, 1 judged red, 2 could not judge."""
    chosen, workload = _choose(operators or [], everything, manifest, case)
    named = backend or (case.split("/")[1] if case and case.count("/") > 2 else None)
    peer = named if not any(o.backend(named or "") for o in chosen) else None
    if peer is not None:
        chosen = [held_to(operator, peer) for operator in chosen]
    planned = gates.cases(chosen, backend=backend, tier=tier.value, seed=seed, identity=case)
    if peer is not None:
        planned = _of_peer(planned)
    _require_runnable(planned)
    if dump is not None:
        report_file.make_folder(dump)
    with report_file.writer(json) as write:
        facts = environment.facts()
        records: list[gates.Record] = []
        finished = False
        try:
            # Other processes know declared backends alone.
            processes = 1 if peer else jobs or os.cpu_count() or 1
            finished = _judge(planned, dump, processes, records)
        finally:
            with report_file.uninterrupted():
                report = gates.summarise(
                    records,
                    tier=tier.value,
                    seed=seed,
                    environment=facts,
                    workload=workload,
                    interrupted=not finished,
                )
                write(report)
    _print(report, json)
    raise typer.Exit(0 if report.passed else 2 if judged_nothing(report) else 1)


def _print(report: gates.Report, json: Path | None) -> None:
    out = console()
    for line in failures(report.records):
        out.print(line, soft_wrap=True)
    out.print(judgments(report.records))
    out.print(conclusion(report))
    if json is not None:
        out.print(f"report: {json}", soft_wrap=True)


def _choose(
    names: Sequence[str], everything: bool, manifest: Path | None, case: str | None
) -> tuple[list[Operator], Workload | None]:
    """The operators to judge, and the workload they are held against."""
    if names and everything:
        raise RlkError("gate: operators must be named or --all, got both")
    if case and (names or everything):
        beside = "--all" if everything else ", ".join(names)
        raise RlkError(f"gate: --case must stand without operators, got {beside} beside it")
    wanted = list(names) or ([case.partition("/")[0]] if case else [])
    if manifest is None:
        if everything:
            return select.every(), None
        if not wanted:
            raise RlkError("gate: operators must be named, got none; give OP, --all or --manifest")
        return select.named(wanted), None
    workload = load_manifest(manifest)
    for name in wanted:
        workload.operator(name)
    chosen = select.named([entry.name for entry in workload.operators])
    held_against = Workload(
        workload_id=workload.workload_id,
        model_id=workload.model.id,
        revision=workload.model.revision,
        manifest_sha256=workload.sha256,
    )
    return [o for o in chosen if not wanted or o.name in wanted], held_against


def _of_peer(planned: Sequence[gates.Case]) -> list[gates.Case]:
    """The cases in which another library can be judged."""
    found = [case for case in planned if case.judgment in PEER_JUDGMENTS]
    if not found:
        told = f"gate: the judgment of another library must be {one_of(PEER_JUDGMENTS)}"
        raise RlkError(f"{told}, got {planned[0].judgment!r}")
    return found


def _require_runnable(planned: Sequence[gates.Case]) -> None:
    """Refuse a run in which nothing could be judged because no backend can run here."""
    pairs = {(case.operator.name, case.backend): case for case in planned}
    reasons = []
    for case in pairs.values():
        try:
            select.backend_for(case.operator, case.device, case.backend)
        except RlkError as error:
            reasons.append(error)
        else:
            return
    raise reasons[0]


def _judge(
    planned: Sequence[gates.Case], dump: Path | None, jobs: int, records: list[gates.Record]
) -> bool:
    """Add the records of each case as it finishes; false if interrupted before the last."""
    failed = 0
    try:
        with progress(len(planned)) as step:
            found = judged(planned, dump, jobs)
            for done, case in enumerate(planned):
                step(done, f"{case.identity}, {failed} failed")
                of_case = next(found)
                records += of_case
                failed += sum(record.status == "failed" for record in of_case)
    except KeyboardInterrupt:
        return False
    return True
