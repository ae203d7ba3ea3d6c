# SPDX-License-Identifier: Apache-2.0
"""The command line on rotary embeddings: what is shown, checked and judged is theirs."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import rlk_rope
from rlk import interpreter, registry
from rlk.cli import app

# Before a kernel is imported: it decides there how it runs.
interpreter.enable_without_gpu()

NAMES = ["multi_axis_rope", "multi_axis_rope_qk"]
MANIFEST = Path(rlk_rope.__file__).with_name("manifest.json")


@pytest.fixture
def invoke(monkeypatch):
    """Runs `rlk` in this process on the operators of this package, installed or not."""
    found = {o.name: o for o in registry.declared_in(rlk_rope.__name__)}
    monkeypatch.setattr(registry, "discover", lambda: (found, {}))
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.mark.parametrize("name", NAMES)
def test_show_every_operator_prints_its_formula_and_workloads(invoke, name):
    result = invoke("show", name)
    assert result.exit_code == 0
    assert "y0 = x0 * cos - x1 * sin" in result.stdout
    assert "Qwen-Image, 1024x1024" in result.stdout


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("multi_axis_rope", "2,5,3,66"),
        ("multi_axis_rope", "2,5,2,8"),
        ("multi_axis_rope_qk", "5,1,128"),
    ],
)
def test_check_every_operator_on_an_odd_shape_stays_within_the_contract(invoke, name, shape):
    result = invoke("check", name, "--backend", "golden", "--shape", shape, "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert "passed: 100.0000 %" in result.stdout


def test_bits_of_this_package_are_those_recorded(invoke):
    assert invoke("bits", *NAMES).exit_code == 0


def test_gate_of_one_case_of_the_manifest_passes(invoke):
    case = "multi_axis_rope/golden/layout/bfloat16"
    assert invoke("gate", "--case", case).exit_code == 0
    assert invoke("gate", "--manifest", MANIFEST, "--backend", "absent").exit_code == 2
