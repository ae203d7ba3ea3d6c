# SPDX-License-Identifier: Apache-2.0
"""`rlk survey` and `rlk bench`: exit status, record and output."""

import json
import sys
from importlib.resources import files

import jsonschema
import pytest
import torch

from rlk.bench.variants import Peer
from rlk.cli import bench, survey
from rlk.records import BenchRow
from rlk.survey import peers, values

SCHEMA = json.loads((files("rlk") / "records" / "records.schema.json").read_bytes())
# The modules, whose names in the package are their commands.
bench_command, survey_command = (sys.modules[command.__module__] for command in (bench, survey))
PEERS = (
    Peer("sum", "torch", lambda told: lambda x: x + x),
    Peer("absent", "no-such-distribution", lambda told: lambda x: x + x),
)


@pytest.fixture(autouse=True)
def known_peers(monkeypatch):
    for module in (peers, values):
        monkeypatch.setattr(module, "peers_of", lambda operator: PEERS)


@pytest.fixture
def record(tmp_path):
    """Where a run may leave its record, and how to read it back."""

    class File:
        path = tmp_path / "record.json"

        def read(self):
            document = json.loads(self.path.read_text())
            jsonschema.validate(document, SCHEMA)
            return document

    return File()


def test_survey_on_a_cpu_gives_everyone_a_verdict(invoke, record):
    result = invoke("survey", "twice", "--json", record.path)
    assert result.exit_code == 0, result.output
    document = record.read()
    assert (document["schema"], document["interrupted"]) == ("rlk.survey/1", False)
    verdicts = {row["variant"]: row.get("verdict", "measured") for row in document["rows"]}
    assert verdicts == {
        "quantum": "not applicable", "golden": "measured", "sum": "measured",
        "absent": "not applicable",
    }  # fmt: skip
    assert "y 0 of 64, dx 0 of 64" in result.stdout
    assert "not applicable: it needs the package no-such-distribution" in result.stdout


def test_survey_interrupted_keeps_the_finished_records(invoke, record, monkeypatch):
    whole = survey_command.survey_variant

    def interrupted(place, name):
        if name == "sum":
            raise KeyboardInterrupt
        return whole(place, name)

    monkeypatch.setattr(survey_command, "survey_variant", interrupted)
    result = invoke("survey", "twice", "--json", record.path)
    assert result.exit_code == 1
    assert "interrupted" in result.stderr
    document = record.read()
    assert document["interrupted"]
    assert [row["variant"] for row in document["rows"]] == ["quantum", "golden"]


@pytest.mark.parametrize("command", ["survey", "bench"])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "operators must be named, got none; give OP or --all"),
        (("twice", "--all"), "operators must be named or --all, got both"),
        (("twise",), "operator must be one of twice, got 'twise'; did you mean twice?"),
        (("twice", "--dtype", "int8"), "--dtype must be one of float32, bfloat16, float16, got"),
    ],
)
def test_command_bad_request_exits_two_with_one_sentence(invoke, command, arguments, sentence):
    result = invoke(command, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


def test_survey_of_a_missing_or_unknown_library_exits_two(invoke):
    unknown = invoke("survey", "twice", "--variant", "nobody")
    assert unknown.exit_code == 2
    assert "must be one of 'quantum', 'golden', 'sum', 'absent', got 'nobody'" in unknown.stderr
    missing = invoke("survey", "twice", "--variant", "absent")
    assert missing.exit_code == 2
    assert missing.stderr.splitlines()[-1] == (
        "rlk: survey: --variant absent must run here, got: it needs the package "
        "no-such-distribution, which is not installed"
    )


def test_gate_of_a_missing_or_unknown_library_exits_two(invoke):
    missing = invoke("gate", "twice", "--backend", "absent")
    assert missing.exit_code == 2
    assert "it needs the package no-such-distribution, which is not installed" in missing.stderr
    unknown = invoke("gate", "twice", "--backend", "nobody")
    assert unknown.exit_code == 2
    assert (
        "backend must be one of 'quantum', 'golden', 'sum', 'absent', got 'nobody'"
        in unknown.stderr
    )


def test_gate_of_a_library_judges_what_it_can_promise(invoke):
    result = invoke("gate", "twice", "--backend", "sum", "--jobs", 4)
    assert result.exit_code == 0, result.output
    assert "backend_equal" not in result.stdout
    rows = [line.split()[1:3] for line in result.stdout.splitlines() if line.startswith("twice ")]
    judgments = ["forward_accuracy", "gradient_accuracy", "forward_invariance"]
    assert rows == [["sum", j] for j in (*judgments, "gradient_invariance", "repeatable")]
    case = "twice/sum/forward_invariance/float32"
    assert invoke("gate", "--case", case).exit_code == 0


@pytest.mark.parametrize("command", ["survey", "bench"])
def test_command_unwritable_record_exits_two_before_any_work(
    invoke, command, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: command == "bench")
    monkeypatch.setattr(survey_command, "survey_variant", None)
    monkeypatch.setattr(bench_command, "measure", None)
    (tmp_path / "file").write_text("")
    result = invoke(command, "twice", "--json", tmp_path / "file" / "below")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"rlk: {command}: --json must be writable, got" in result.stderr


def test_bench_without_a_gpu_exits_two_and_says_what_runs(invoke, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = invoke("bench", "twice")
    assert result.exit_code == 2
    assert "must have an NVIDIA GPU, got none; rlk survey runs without one" in result.stderr


def test_bench_interrupted_keeps_the_sizes_it_has(invoke, record, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_command, "origin", lambda: survey_origin())
    told = []
    monkeypatch.setattr(
        bench_command.refusals, "refusals", lambda operator, dtype: {"cuda": ("failed", "red")}
    )

    def measured(work, refused):
        told.append((work.label, refused))
        if len(told) == 2:
            raise KeyboardInterrupt
        return [
            BenchRow(
                operator="twice", size=work.label, layout="packed", dtype="bfloat16", variant="a"
            )
        ]

    monkeypatch.setattr(bench_command, "measure", measured)
    result = invoke("bench", "twice", "--rows", 8, "--json", record.path)
    assert result.exit_code == 1
    assert [label for label, _ in told] == ["4x8", "8x8"]
    assert told[0][1] == {"cuda": ("failed", "red")}
    document = record.read()
    assert (document["schema"], document["interrupted"]) == ("rlk.bench/2", True)
    assert [row["size"] for row in document["rows"]] == ["4x8"]


def test_bench_with_jobs_judges_all_operators_before_it_measures(invoke, record, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_command, "origin", lambda: survey_origin())
    told = []

    def judged(wanted, jobs):
        told.append(([(operator.name, dtype) for operator, dtype in wanted], jobs))
        return [{"cuda": ("failed", dtype)} for _, dtype in wanted]

    def measured(work, refused):
        told.append((str(work.dtype), refused))
        return []

    def compiled(works, jobs):
        told.append(([(work.operator.name, str(work.dtype)) for work in works], jobs))

    monkeypatch.setattr(bench_command.refusals, "side_by_side", judged)
    monkeypatch.setattr(bench_command.compiled, "side_by_side", compiled)
    monkeypatch.setattr(bench_command, "measure", measured)
    dtypes = ("float32", "float16")
    options = [word for dtype in dtypes for word in ("--dtype", dtype)]
    result = invoke("bench", "twice", "--jobs", 3, *options, "--json", record.path)
    assert result.exit_code == 0, result.output
    assert told[0] == ([("twice", dtype) for dtype in dtypes], 3)
    assert told[1] == ([("twice", f"torch.{dtype}") for dtype in dtypes], 3)
    assert told[2:] == [(f"torch.{dtype}", {"cuda": ("failed", dtype)}) for dtype in dtypes]


def survey_origin():
    """An origin made while the machine says that it has no GPU."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: False)
        return survey_command.origin()
