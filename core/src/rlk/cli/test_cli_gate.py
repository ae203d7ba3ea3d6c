# SPDX-License-Identifier: Apache-2.0
"""`rlk gate`: exit status, report and output, with a judge that does as it is told."""

import hashlib
import json
import os
import signal
from dataclasses import replace
from importlib.resources import files

import jsonschema
import pytest
from msgspec.structs import replace as changed

from rlk import gates, registry
from rlk.cli.report_file import json_schema
from rlk.gates.record import Mismatch
from rlk.gates.verdict import not_run

SCHEMA = json.loads((files("rlk") / "gates" / "report.schema.json").read_bytes())
CASE = "twice/golden/forward_accuracy/bfloat16"
MISMATCH = Mismatch(index=[0, 3], actual="1.0 (0x3f80)", expected="2.0 (0x4000)", count=2)


def passed(case):
    return changed(
        not_run(case, ""), status="passed", reason=None, tensor="y", comparisons=7, shape=[4, 8]
    )


def failed(case):
    return changed(
        passed(case),
        status="failed",
        reason="2 elements beyond",
        config="chunked",
        config_pair="canonical",
        first_mismatch=MISMATCH,
    )


@pytest.fixture
def judged(monkeypatch):
    """Replaces the judge; the value collects (case, dump) of every call."""
    calls = []

    def use(answer):
        def judge(case, dump=None):
            calls.append((case, dump))
            return answer(case)

        monkeypatch.setattr(gates, "judge", judge)
        return calls

    return use


@pytest.fixture
def manifest(tmp_path):
    """Writes a valid manifest that covers the operators of these names."""

    def write(*names):
        values = {"layers": 1}
        site = {
            "name": "block", "width": 1, "width_from": "layers", "rows_per_token": 1,
            "instances": 1,
        }  # fmt: skip
        backends = dict.fromkeys(("golden", "triton", "cuda"), "declared")
        document = {
            "schema": "rlk/workload-1",
            "workload_id": "toy",
            "model": {"id": "toy/model", "revision": "0" * 40},
            "architecture": {"values": values, "fingerprint": digest(values)},
            "weights": {
                "shard_count": 1, "files_total_bytes": 1, "index_total_bytes": 1,
                "shards": [{"name": "toy", "sha256": "a" * 64, "size": 1}],
            },
            "execution": {
                "dtypes": ["bfloat16"], "accumulation": "float32", "tf32": "off",
                "fast_math": "off",
            },
            "stochastic": {"seed": 0, "dropout": 0},
            "chain": {
                "loss_reduction": "sum",
                "comparison_roles": {
                    "accuracy": "oracle", "bits": "golden", "invariance": "candidate",
                },
            },
            "provenance": {
                "full_model_evidence": False, "weights": "synthetic", "scope": list(names),
                "boundary": "this test",
            },
            "operators": [
                {"name": name, "scalars": {}, "backends": backends, "sites": [site]}
                for name in names
            ],
            "fixtures": [{"id": "one", "sample_lengths": [1], "tokens": 1}],
            "cases": [{"id": "a", "fixture": "one", "transform": "canonical", "samples": [0]}],
        }  # fmt: skip
        path = tmp_path / "manifest.json"
        path.write_text(json.dumps({**document, "sha256": digest(document)}))
        return path

    return write


def digest(document):
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def test_schema_file_always_matches_the_structs():
    assert json_schema() == SCHEMA
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_gate_all_green_exits_zero_with_a_valid_report(invoke, judged, report):
    calls = judged(lambda case: [passed(case)])
    result = invoke("gate", "twice", "--backend", "golden", "--json", report.path)
    assert result.exit_code == 0
    document = report.read()
    assert (document["status"], document["passed"], document["workload"]) == ("passed", True, None)
    assert (document["tier"], document["seed"]) == ("short", 2026)
    assert document["environment"]["packages"]["rlk-core"]["version"]
    # Three dtypes of seven comparisons a judgment.
    row = next(line for line in result.stdout.splitlines() if "forward_accuracy" in line)
    assert row.split() == ["twice", "golden", "forward_accuracy", "21", "3", "0", "0"]
    assert len(document["records"]) == len(calls)
    assert f"passed: {7 * len(calls)} comparisons" in result.stdout


def test_gate_one_red_record_exits_one_and_says_where(invoke, judged, report):
    judged(lambda case: [failed(case) if case.identity == CASE else passed(case)])
    result = invoke("gate", "--all", "--backend", "golden", "--json", report.path)
    assert result.exit_code == 1
    assert (report.read()["status"], report.read()["passed"]) == ("failed", False)
    start = result.stdout.index("FAILED")
    assert result.stdout[start:].splitlines()[:4] == [
        "FAILED twice golden forward_accuracy: y bfloat16 [4, 8], chunked against canonical",
        "  2 elements beyond",
        "  first at [0, 3]: 1.0 (0x3f80) instead of 2.0 (0x4000)",
        f"  repeat: rlk gate --case {CASE} --seed 2026",
    ]
    row = next(line for line in result.stdout.splitlines() if line.startswith("twice "))
    assert row.split() == ["twice", "golden", "forward_accuracy", "21", "2", "1", "0"]


def test_gate_claim_that_cannot_run_is_listed_and_not_passed(invoke, judged, report):
    judged(
        lambda case: [
            not_run(case, "it needs a GPU") if "gradient" in case.judgment else passed(case)
        ]
    )
    result = invoke("gate", "twice", "--backend", "golden", "--json", report.path)
    assert result.exit_code == 0
    row = next(line for line in result.stdout.splitlines() if "gradient_accuracy" in line)
    assert row.split()[3:] == ["0", "0", "0", "3", "it", "needs", "a", "GPU"]
    assert {r["status"] for r in report.read()["records"]} == {"passed", "not_run"}


def test_gate_nothing_judged_exits_two(invoke, judged, report):
    judged(lambda case: [not_run(case, "it needs a GPU")])
    result = invoke("gate", "--case", CASE, "--json", report.path)
    assert result.exit_code == 2
    assert "nothing could be judged: 1 not run" in result.stdout
    assert report.read()["status"] == "failed"


@pytest.mark.parametrize("chosen", [("twice", "other"), ("other", "twice"), ("--all",)])
def test_gate_operator_without_the_backend_is_listed_as_not_run(
    invoke, judged, report, twice, monkeypatch, chosen
):
    real = gates.judge
    judged(lambda case: [passed(case)] if case.operator is twice else real(case))
    other = replace(twice, name="other", backends=twice.backends[:1])
    monkeypatch.setattr(registry, "discover", lambda: ({"twice": twice, "other": other}, {}))
    result = invoke("gate", *chosen, "--backend", "golden", "--json", report.path)
    assert result.exit_code == 0
    skipped = [r for r in report.read()["records"] if r["operator"] == "other"]
    assert {r["status"] for r in skipped} == {"not_run"}
    assert {r["reason"] for r in skipped} == {"it has no backend 'golden', only 'quantum'"}
    judgments = {r["judgment"] for r in report.read()["records"] if r["operator"] == "twice"}
    assert {r["judgment"] for r in skipped} == judgments
    assert f"0 failed, {len(skipped)} not run" in result.stdout
    rows = [line for line in result.stdout.splitlines() if line.startswith("other ")]
    assert all(row.endswith("it has no backend 'golden', only 'quantum'") for row in rows)
    assert len(rows) == len(judgments)


def test_gate_as_many_records_as_comparisons_are_said_once(invoke, judged):
    judged(lambda case: [changed(passed(case), comparisons=1)])
    last = invoke("gate", "--case", CASE).stdout.splitlines()[-1]
    assert last == "passed: 1 records passed, 0 failed, 0 not run"


def test_gate_interrupted_run_keeps_the_finished_records(invoke, judged, report):
    def answer(case):
        if len(calls) == 3:
            raise KeyboardInterrupt
        return [passed(case)]

    calls = judged(answer)
    result = invoke("gate", "twice", "--json", report.path)
    assert result.exit_code == 1
    assert (report.read()["status"], report.read()["passed"]) == ("interrupted", False)
    finished = [case.repro for case, _ in calls[:2]]
    assert [record["repro"] for record in report.read()["records"]] == finished
    assert "interrupted: 14 comparisons, 2 records passed" in result.stdout


def test_gate_interrupt_while_the_report_is_written_is_ignored(invoke, judged, report, monkeypatch):
    judged(lambda case: [passed(case)])
    summarise = gates.summarise

    def interrupted(*arguments, **options):
        os.kill(os.getpid(), signal.SIGINT)
        return summarise(*arguments, **options)

    monkeypatch.setattr(gates, "summarise", interrupted)
    assert invoke("gate", "--case", CASE, "--json", report.path).exit_code == 0
    assert report.read()["passed"]


def test_gate_old_report_is_replaced(invoke, judged, report):
    judged(lambda case: [passed(case)])
    report.path.write_text("{}" * 100_000)
    assert invoke("gate", "--case", CASE, "--json", report.path).exit_code == 0
    assert len(report.read()["records"]) == 1


def test_gate_judge_that_breaks_keeps_the_finished_records(invoke, judged, report):
    calls = judged(lambda case: [passed(case)] if len(calls) < 3 else 1 / 0)
    result = invoke("gate", "twice", "--json", report.path)
    assert isinstance(result.exception, ZeroDivisionError)
    assert (report.read()["status"], len(report.read()["records"])) == ("interrupted", 2)


def test_gate_report_without_finite_error_writes_null(invoke, judged, report):
    errors = {"max_abs_error": float("nan"), "mean_abs_error": float("inf")}
    judged(lambda case: [changed(passed(case), **errors)])
    assert invoke("gate", "--case", CASE, "--json", report.path).exit_code == 0
    (record,) = report.read()["records"]
    assert (record["max_abs_error"], record["mean_abs_error"]) == (None, None)


def test_gate_options_reach_the_judge(invoke, judged, tmp_path):
    calls = judged(lambda case: [passed(case)])
    dump = tmp_path / "made" / "here"
    result = invoke("gate", "--case", CASE, "--seed", "5", "--tier", "full", "--dump", dump)
    assert result.exit_code == 0
    ((case, folder),) = calls
    assert (case.identity, case.seed, case.tier, folder) == (CASE, 5, "full", dump)
    assert dump.is_dir()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "gate: operators must be named, got none; give OP, --all or --manifest"),
        (("twice", "--all"), "gate: operators must be named or --all, got both"),
        (("twise",), "operator must be one of twice, got 'twise'; did you mean twice?"),
        (
            ("twice", "--backend", "cuda"),
            "twice: backend must be one of 'quantum', 'golden', 'torch.compile', got 'cuda'",
        ),
        (
            ("twice", "--backend", "quantum"),
            'twice: backend "quantum" cannot run here: it needs qubits',
        ),
        (
            ("twice", "--case", CASE),
            "gate: --case must stand without operators, got twice beside it",
        ),
        (
            ("--all", "--case", CASE),
            "gate: --case must stand without operators, got --all beside it",
        ),
        (
            ("--case", "twice/torch.compile/layout/bfloat16"),
            "gate: the judgment of another library must be one of 'forward_accuracy', ",
        ),
        (("--case", "twice/golden"), "case must be OPERATOR/BACKEND/JUDGMENT/DTYPE like"),
        (
            ("twice", "--manifest", "absent.json"),
            "manifest: the file must be readable, got 'absent.json' (No",
        ),
    ],
)
def test_gate_bad_request_exits_two_with_one_sentence(invoke, judged, arguments, sentence):
    calls = judged(lambda case: [passed(case)])
    result = invoke("gate", *arguments)
    assert (result.exit_code, result.stdout, calls) == (2, "", [])
    assert result.stderr.startswith(f"rlk: {sentence}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("option", ["--json", "--dump"])
def test_gate_unwritable_path_exits_two_before_any_work(invoke, judged, tmp_path, option):
    calls = judged(lambda case: [passed(case)])
    blocked = tmp_path / "file"
    blocked.write_text("")
    result = invoke("gate", "twice", option, blocked / "below")
    assert (result.exit_code, result.stdout, calls) == (2, "", [])
    assert result.stderr == (
        f"rlk: gate: {option} must be writable, got {blocked / 'below'} (Not a directory)\n"
    )


def test_gate_all_with_a_broken_package_exits_two(invoke, judged, twice, monkeypatch):
    calls = judged(lambda case: [passed(case)])
    monkeypatch.setattr(registry, "discover", lambda: ({"twice": twice}, {"b": ImportError("c")}))
    result = invoke("gate", "--all")
    assert (result.exit_code, calls) == (2, [])
    assert result.stderr == "rlk: package b must be importable, got ImportError: c\n"


def test_gate_manifest_restricts_to_its_operators_and_is_reported(
    invoke, judged, report, manifest, twice, monkeypatch
):
    calls = judged(lambda case: [passed(case)])
    other = replace(twice, name="other")
    monkeypatch.setattr(registry, "discover", lambda: ({"twice": twice, "other": other}, {}))
    path = manifest("twice")
    assert invoke("gate", "--manifest", path, "--json", report.path).exit_code == 0
    assert {case.operator.name for case, _ in calls} == {"twice"}
    assert report.read()["workload"] == {
        "workload_id": "toy",
        "model_id": "toy/model",
        "revision": "0" * 40,
        "manifest_sha256": json.loads(path.read_text())["sha256"],
    }
    refused = invoke("gate", "other", "--manifest", path)
    assert refused.exit_code == 2
    assert refused.stderr == "rlk: manifest: $.operators must cover other, got twice\n"


def test_gate_manifest_operator_not_installed_exits_two(invoke, judged, manifest):
    calls = judged(lambda case: [passed(case)])
    result = invoke("gate", "--manifest", manifest("twice", "thrice"))
    assert (result.exit_code, calls) == (2, [])
    assert result.stderr.startswith("rlk: operator must be one of twice, got 'thrice'")


def test_gate_progress_in_a_log_is_a_few_plain_lines(invoke, judged):
    calls = judged(lambda case: [passed(case)])
    lines = invoke("gate", "twice").stderr.splitlines()
    assert lines[0] == f"0 of {len(calls)} done in 0 s, now {calls[0][0].identity}, 0 failed"
    assert 2 <= len(lines) <= 11 < len(calls)
