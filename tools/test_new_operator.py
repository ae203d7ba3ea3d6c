# SPDX-License-Identifier: Apache-2.0
"""A new operator installs, passes every gate untouched, and fails one after a one-line fault."""

import json
import os
import subprocess
import sys

import new_operator
import pytest

# Not the template's own name: what is left unreplaced would show.
NAME = "tally_rows"
FOLDER = f"src/rlk_{NAME}/{NAME}"


def run(*command, path, **options):
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, **options
    )


@pytest.fixture
def package(tmp_path):
    return new_operator.new_package(NAME, tmp_path)


@pytest.fixture
def gate(package, tmp_path):
    """Install the package beside the current environment and judge; exit status and report."""

    def judge(*arguments):
        site = tmp_path / "site"
        options = ["--no-deps", "--no-build-isolation", "--no-index", "--upgrade", "--quiet"]
        install = [sys.executable, "-m", "pip", "install", *options, "--target", site, package]
        installed = run(*install, path="")
        assert installed.returncode == 0, installed.stderr
        report = tmp_path / "report.json"
        command = [sys.executable, "-m", "rlk.cli", "gate", *arguments, "--json", report]
        done = run(*command, path=site, cwd=tmp_path)
        assert report.exists(), done.stderr
        return done.returncode, json.loads(report.read_text())["records"]

    return judge


def test_new_package_no_name_of_the_template_is_left(package):
    files = [file for file in package.rglob("*") if file.is_file()]
    assert (package / FOLDER / f"test_{NAME}.py") in files
    assert not [file for file in files if "demo" in str(file.relative_to(package))]
    assert not [file for file in files if "demo" in file.read_text()]


# 900 seconds: the Triton interpreter is slow on a loaded machine.
@pytest.mark.timeout(900)
def test_new_package_untouched_passes_every_gate(gate):
    status, records = gate(NAME)
    assert {r["backend"] for r in records} == {"golden", "triton"}
    assert {r["judgment"] for r in records if r["status"] != "passed"} <= {"gpu_to_gpu"}
    assert status == 0


def test_new_package_its_own_tests_pass_besides_gates(package):
    options = ["-v", "-k", "not gate", "-p", "no:cacheprovider", f"--rootdir={package}"]
    done = run(sys.executable, "-m", "pytest", *options, path=package / "src", cwd=package)
    assert done.returncode == 0, done.stdout
    assert "test_registration_opcheck_passes" in done.stdout


@pytest.mark.parametrize(
    ("file", "line", "fault", "backend", "red"),
    [
        (
            "golden.py",
            "return damping[:, None] * g - xhat * (m + m)[:, None]",
            "return damping[:, None] * g - xhat * m[:, None]",
            "golden",
            "gradient_accuracy",
        ),
        (
            "kernel_triton.py",
            "add_block(state, columns, n, upstream * xhat, inside)",
            "add_block(state, columns, n, upstream * damping[:, None], inside)",
            "triton",
            "backend_equal",
        ),
    ],
    ids=["golden", "triton"],
)
def test_new_package_one_line_fault_turns_its_gate_red(
    gate, package, file, line, fault, backend, red
):
    path = package / FOLDER / file
    assert path.read_text().count(line) == 1
    path.write_text(path.read_text().replace(line, fault))
    status, records = gate("--case", f"{NAME}/{backend}/{red}/float32")
    assert status == 1
    assert "failed" in {r["status"] for r in records}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Fold", "--into", "x"], "name must be lower case"),
        (["fold-rows", "--into", "x"], "name must be lower case"),
        (["lambda"], "name must be no keyword and no module of the folder, got 'lambda'"),
        (["golden"], "name must be no keyword and no module of the folder, got 'golden'"),
        (["fold_backward"], "name must not end in _backward"),
        (["fold", "--into", __file__], "must be writable, got Not a directory"),
        (["fold", "--package", "rlk-absent"], "--package must be a folder of packages/"),
    ],
)
def test_command_unfit_request_exits_2_with_one_sentence(arguments, words, capsys):
    with pytest.raises(SystemExit) as caught:
        new_operator.main(arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_command_name_alone_makes_a_package_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert new_operator.main(["fold"]) == 0
    assert (tmp_path / "rlk-fold" / "pyproject.toml").is_file()


def test_command_existing_target_is_left_alone(tmp_path, capsys):
    assert new_operator.main(["fold", "--into", str(tmp_path)]) == 0
    written = tmp_path / "rlk-fold" / "README.md"
    written.write_text("mine")
    with pytest.raises(SystemExit):
        new_operator.main(["fold", "--into", str(tmp_path)])
    assert "must not exist yet" in capsys.readouterr().err
    assert written.read_text() == "mine"


def test_command_package_of_this_repository_gets_one_folder(tmp_path, monkeypatch, capsys):
    module = tmp_path / "packages" / "rlk-toy" / "src" / "rlk_toy"
    module.mkdir(parents=True)
    monkeypatch.setattr(new_operator, "ROOT", tmp_path)
    assert new_operator.main(["fold", "--package", "rlk-toy"]) == 0
    assert "from rlk_toy.fold import fold" in capsys.readouterr().out
    names = {path.name for path in (module / "fold").iterdir()}
    assert {"__init__.py", "operator.py", "oracle.py", "golden.py", "kernel_triton.py"} <= names
    assert {"test_fold.py", "page.md", "golden_hashes.json"} <= names
    assert 'package="rlk_toy"' in (module / "fold" / "operator.py").read_text()
