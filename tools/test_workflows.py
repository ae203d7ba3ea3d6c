# SPDX-License-Identifier: Apache-2.0
"""Workflows and environments: pinned actions, commands that exist, one package each."""

import re
import tomllib
from pathlib import Path

import check_alone
import pytest

from rlk import cli
from rlk.test_support import install

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ENVIRONMENTS = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]
PACKAGES = sorted(folder.name for folder in (ROOT / "packages").iterdir())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_actions_are_pinned_by_commit(path):
    used = re.findall(r"uses: (.*)", path.read_text())
    assert used
    assert [u for u in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", u)] == []


def test_workflow_commands_of_hatch_and_scripts_exist():
    text = "\n".join(path.read_text() for path in WORKFLOWS)
    commands = re.findall(r"hatch run (?:\"[^\"]*\" )?([\w:]+)", text)
    for command in commands:
        environment, _, script = command.rpartition(":")
        scripts = ENVIRONMENTS[environment or "default"]["scripts"]
        assert script in scripts, command
    for script in re.findall(r"bash (\S+\.sh)", text):
        assert (ROOT / script).is_file(), script
    called = {
        "check",
        "gate",
        "test:all",
        "integration:all",
        "compat:all",
        "docs:build",
        "docs:test",
    }
    assert called <= set(commands)


def test_test_environments_hold_core_and_one_package_each():
    test = ENVIRONMENTS["test"]
    assert test["workspace"]["members"] == ["core"]
    assert test["overrides"]["matrix"]["package"]["workspace"]["members"] == [
        "packages/rlk-{matrix:package}"
    ]
    (axis,) = [row["package"] for row in test["matrix"] if "package" in row]
    assert [f"rlk-{name}" for name in sorted(axis)] == PACKAGES


def test_doctor_range_lies_in_that_of_the_compat_environments():
    (matrix,) = ENVIRONMENTS["compat"]["matrix"]
    series = [tuple(map(int, version.split(".")[:2])) for version in matrix["torch"]]
    ends = cli.doctor.__globals__["TESTED"]
    assert [f"{major}.{minor}" for major, minor in (min(series), max(series))] == list(
        ends["torch"]
    )
    # The newer ones are defined; whoever has run them raises the end.
    assert matrix["python"][0] == ends["python"][0]
    assert ends["python"][1] in matrix["python"]


@pytest.mark.parametrize(
    ("paths", "others"),
    [
        (["core", "tools"], ["rlk-rope"]),
        (["packages/rlk-rope/src"], []),
        (["packages/rlk-qwen3next/src"], ["rlk-rope"]),
    ],
)
def test_check_alone_names_packages_that_are_not_under_test(paths, others):
    assert check_alone.beside(paths, ["rlk-rope"]) == others


def test_check_alone_fails_beside_another_package(tmp_path, monkeypatch, capsys):
    install(tmp_path, "neighbour", {"__init__.py": ""})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert check_alone.main(["core", "tools"]) == 1
    assert "core, tools must be tested alone, got" in capsys.readouterr().out
