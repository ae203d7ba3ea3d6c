# SPDX-License-Identifier: Apache-2.0
"""The command line on the real norms: what is shown, checked and judged is theirs."""

import importlib.util
import json
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

import rlk.gates
import rlk_qwen3next
from rlk import interpreter, registry
from rlk.cli import app

# Before a kernel is imported: it decides there how it runs.
interpreter.enable_without_gpu()

FOLDER = Path(rlk_qwen3next.__file__).parent
SCHEMA = json.loads((Path(rlk.gates.__file__).parent / "report.schema.json").read_text())
# In the order of a list; the last two run on GPUs alone.
ON_CPUS = ["qwen3_next_rms_norm", "rms_norm", "rms_norm_gated", "rms_norm_residual"]
NAMES = [*ON_CPUS, "rms_norm_residual_vllm", "rms_norm_vllm"]
BFLOAT16 = ("--dtype", "bfloat16")
BACKENDS = ["golden"]
if importlib.util.find_spec("triton") is not None:
    BACKENDS.append("triton")


@pytest.fixture
def invoke(monkeypatch):
    """Runs `rlk` in this process on the operators of this package, installed or not."""
    found = {o.name: o for o in registry.declared_in(rlk_qwen3next.__name__)}
    monkeypatch.setattr(registry, "discover", lambda: (found, {}))
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


def test_list_of_this_package_names_its_operators(invoke):
    lines = invoke("list").stdout.splitlines()
    assert [line.split()[0] for line in lines if "rlk_qwen3next" in line] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_show_every_norm_prints_its_formula(invoke, name):
    result = invoke("show", name)
    assert result.exit_code == 0
    of = "residual_out" if "residual" in name else "x"
    inside = f"(sum({of}^2) / N + eps)"
    assert ("rsqrt" if name.endswith("vllm") else "1 / sqrt") + inside in result.stdout


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ON_CPUS)
def test_check_every_norm_on_an_odd_shape_stays_within_the_contract(invoke, name, backend):
    result = invoke("check", name, "--backend", backend, "--shape", "3,5,131", *BFLOAT16)
    assert result.exit_code == 0, result.output
    assert f"backend {backend}," in result.stdout
    assert "passed: 100.0000 %" in result.stdout


def test_check_wrong_formula_exits_one(invoke, monkeypatch):
    operator = registry.discover()[0]["rms_norm"]
    golden = operator.backend("golden").load()
    sqrt = golden.sqrt
    monkeypatch.setattr(golden, "sqrt", lambda x: sqrt(x) * 1.5)
    result = invoke("check", "rms_norm", "--backend", "golden", "--shape", "7,64")
    assert result.exit_code == 1
    assert "failed: " in result.stdout


def test_gate_manifest_of_this_package_is_named_in_the_report(invoke, tmp_path):
    report = tmp_path / "report.json"
    manifest = FOLDER / "manifest.json"
    case = "rms_norm/golden/forward_accuracy/bfloat16"
    result = invoke("gate", "--manifest", manifest, "--case", case, "--json", report)
    assert result.exit_code == 0, result.output
    document = json.loads(report.read_text())
    jsonschema.validate(document, SCHEMA)
    assert document["workload"]["manifest_sha256"] == json.loads(manifest.read_text())["sha256"]
    assert {r["provenance"]["actual"][0] for r in document["records"]} == {"golden"}


def test_bits_of_every_norm_are_the_recorded_ones(invoke):
    result = invoke("bits", "--json")
    assert (result.exit_code, list(json.loads(result.stdout))) == (0, NAMES)


def test_check_of_few_columns_says_why_values_are_not_judged(invoke):
    assert invoke("check", "rms_norm", "--backend", "golden", "--shape", "33,8").exit_code == 0
    refused = invoke("check", "rms_norm", "--backend", "golden", "--shape", "33,7")
    assert refused.exit_code == 2
    assert refused.stderr == (
        "rlk: check: N must be at least 8 for values to tell a right kernel from a wrong one, "
        "got 7; rlk gate compares its bits there\n"
    )
