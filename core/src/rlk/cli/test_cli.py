# SPDX-License-Identifier: Apache-2.0
"""The commands that tell what is installed, and `check`."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlk import cli, registry
from rlk.errors import BackendError
from rlk.gates import golden_hashes
from rlk.operator import Claim, Limit
from rlk.test_support import tiny_operator

GPU = torch.cuda.is_available()


def cells(output, first):
    """The cells of the table row that begins with this cell."""
    (row,) = [line for line in output.splitlines() if line.split()[:1] == [first]]
    return row.split()


def test_list_installed_operator_shows_package_version_backends_and_claims(invoke):
    result = invoke("list")
    assert result.exit_code == 0
    assert cells(result.stdout, "twice") == [
        "twice", "tiny_operators", "3", "quantum,", "golden", "repeatable,", "batch_invariant",
    ]  # fmt: skip


def test_list_word_that_is_claimed_twice_is_shown_once(invoke, twice, monkeypatch):
    claims = (*twice.claims, Claim("repeatable", ("y",), among=("golden",)))
    found = {"twice": replace(twice, claims=claims)}
    monkeypatch.setattr(registry, "discover", lambda: (found, {}))
    assert cells(invoke("list").stdout, "twice")[-2:] == ["repeatable,", "batch_invariant"]


def test_list_broken_package_is_named_on_standard_error(invoke, monkeypatch):
    failures = {"broken": ImportError("no module\nof this name")}
    monkeypatch.setattr(registry, "discover", lambda: ({}, failures))
    result = invoke("list")
    assert result.exit_code == 0
    assert result.stderr == (
        "rlk: operators of broken are missing: ImportError: no module of this name\n"
    )


def test_show_operator_explains_choice_and_rejection(invoke):
    result = invoke("show", "twice")
    assert result.exit_code == 0
    assert "y = x + x" in result.stdout
    assert "[..., N]" in result.stdout
    assert cells(result.stdout, "quantum")[1:4] == ["it", "needs", "qubits"]
    assert cells(result.stdout, "golden")[1] == "chosen"
    assert cells(result.stdout, "repeatable") == ["repeatable", "y,", "dx"]


def test_show_brackets_of_a_formula_are_not_markup(invoke, twice, monkeypatch):
    indexed = replace(twice, formula="y[i] = x[i] + x[i]")
    monkeypatch.setattr(registry, "discover", lambda: ({"twice": indexed}, {}))
    assert "y[i] = x[i] + x[i]\n" in invoke("show", "twice").stdout


def test_show_unknown_operator_exits_two_with_one_sentence(invoke):
    result = invoke("show", "twce")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "rlk: operator must be one of twice, got 'twce'; did you mean twice?\n"
    )


def test_env_json_is_the_document_behind_the_table(invoke):
    facts = json.loads(invoke("env", "--json").stdout)
    assert facts["torch"] == str(torch.__version__)
    table = invoke("env").stdout
    assert cells(table, "torch") == ["torch", facts["torch"]]
    assert cells(table, "rlk-core")[1].rstrip(",") == facts["packages"]["rlk-core"]["version"]


def test_bits_without_hashes_exits_one_until_written(invoke, twice, monkeypatch):
    first = invoke("bits", "twice")
    assert first.exit_code == 1
    assert "rlk bits --write twice" in first.stdout
    assert invoke("bits", "--write", "twice").exit_code == 0
    result = invoke("bits", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (
        0,
        {"twice": {"bits_version": 3, "fault": None}},
    )


def test_bits_broken_package_exits_two(invoke, monkeypatch):
    monkeypatch.setattr(registry, "discover", lambda: ({}, {"broken": ImportError("gone")}))
    result = invoke("bits")
    assert result.exit_code == 2
    assert result.stderr == "rlk: package broken must be importable, got ImportError: gone\n"


def test_check_right_operator_passes_with_its_rate(invoke):
    result = invoke("check", "twice", "--device", "cpu", "--shape", "2,3,5", "--dtype", "float16")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "backend golden, device cpu, x [2, 3, 5], seed 2026" in result.stdout
    assert cells(result.stdout, "y")[1:7] == ["float16", "[2,", "3,", "5]", "100.0000", "%"]
    assert cells(result.stdout, "dx")[-1] == "passed"
    assert "passed: 100.0000 % of 60 elements within the contract" in result.stdout


def test_check_without_gradients_judges_outputs_alone(invoke):
    result = invoke("check", "twice", "--device", "cpu", "--shape", "3x5", "--no-grad")
    assert "passed: 100.0000 % of 15 elements" in result.stdout


def test_check_wrong_values_exit_one_with_their_rate(invoke, twice, monkeypatch):
    golden = twice.backend("golden").load()

    def forward(x):
        golden.start_golden("twice_forward", golden.__file__)
        y = x + x
        y[0, 0] += 1.0
        return (y,)

    monkeypatch.setattr(golden, "forward", forward)
    result = invoke("check", "twice", "--device", "cpu", "--shape", "4,5")
    assert result.exit_code == 1
    assert "y: 1 of 20 elements beyond" in result.stdout
    assert "failed: 97.5000 % of 40 elements within the contract" in result.stdout


def test_check_backend_that_reports_nothing_exits_one(invoke, twice, monkeypatch):
    monkeypatch.setattr(twice.backend("golden").load(), "start_golden", lambda *_: None)
    result = invoke("check", "twice", "--device", "cpu")
    assert result.exit_code == 1
    assert "backend golden was chosen, ran nothing" in result.stdout


@pytest.mark.parametrize(
    ("limit", "sizes", "given", "follow"),
    [
        (Limit(2, "M", "N"), {"M": 32, "N": 9}, {"N"}, {"M": 4}),
        (Limit(2, "M", "N"), {"M": 4, "N": 9}, {"N"}, {}),
        (Limit(2, "M", "N"), {"M": 32, "N": 9}, {"M", "N"}, {}),
        (Limit(2, "M", "N", exactly=True), {"M": 64, "N": 108}, {"M"}, {"N": 128}),
        (Limit(2, "M", "N", exactly=True), {"M": 64, "N": 108}, {"N"}, {"M": 54}),
    ],
)
def test_check_sizes_not_given_follow_from_those_given(limit, sizes, given, follow):
    operator = tiny_operator("limited", limits=(limit,))
    assert cli.check.__globals__["_following"](operator, sizes, given) == follow


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--shape", "3,0", "check: --shape must be positive integers for [..., N], got '3,0'"),
        ("--shape", "", "check: --shape must be positive integers for [..., N], got ''"),
        ("--shape", "9" * 5000, "check: --shape must be positive integers for [..., N], got '999"),
        ("--shape", "9999999,9999999", "check: --shape must be of at most 2**32 elements, got"),
        ("--dtype", "int8", "check: --dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ("--device", "moon", "check: --device must be cpu, cuda or cuda:N, got 'moon'"),
        ("--device", "cuda:99", "check: --device must be present, got 'cuda:99'"),
        (
            "--backend",
            "cuda",
            "twice: backend must be one of 'auto', 'quantum', 'golden', got 'cuda'",
        ),
        ("--backend", "quantum", 'twice: backend "quantum" cannot run here: it needs qubits'),
    ],
)
def test_check_bad_option_exits_two_with_one_sentence(invoke, option, value, sentence):
    result = invoke(
        "check", "twice", *(("--device", "cpu") if option != "--device" else ()), option, value
    )
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"rlk: {sentence}")
    assert result.stderr.count("\n") == 1


def test_check_shape_beyond_memory_exits_two(invoke, twice, monkeypatch):
    def forward(x):
        return (x.new_empty(2**60),)

    monkeypatch.setattr(twice.backend("golden").load(), "forward", forward)
    result = invoke("check", "twice", "--device", "cpu", "--shape", "2,3")
    assert result.exit_code == 2
    assert result.stderr == "rlk: check: --shape must fit into memory, got '2,3'\n"


@pytest.mark.parametrize("command", ["check", "gate"])
@pytest.mark.parametrize("seed", ["-1", "4294967296", "99999999999999999999999"])
def test_seed_out_of_range_exits_two(invoke, command, seed):
    result = invoke(command, "twice", "--seed", seed)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: Invalid value for '--seed': " in result.stderr


def test_bits_unreadable_hashes_exit_two(invoke, monkeypatch, tmp_path):
    monkeypatch.setattr(golden_hashes, "path", lambda operator: tmp_path)
    result = invoke("bits", "twice")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith("must be readable, got Is a directory\n")


def test_build_refused_architecture_exits_two_with_the_first_error(invoke, monkeypatch):
    def binary(arch):
        raise BackendError(
            f"build: a.cu must compile, got\nFAILED: nvcc error\nnvcc fatal : {arch}\nx"
        )

    module = SimpleNamespace(binary=binary)
    monkeypatch.setitem(cli.build.__globals__, "_modules", lambda *_: {"twice": module})
    result = invoke("build", "twice", "--arch", "sm_1")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == (
        "rlk: build: a.cu must compile, got nvcc fatal : sm_1"
    )


@pytest.mark.parametrize("arguments", [("list",), ("env",), ("env", "--json"), ("--help",)])
def test_program_output_that_cannot_be_written_exits_two(program, arguments):
    with open("/dev/full", "w") as full:
        running = program(*arguments, stdout=full)
        _, err = running.communicate()
    assert (running.returncode, err) == (
        2, "rlk: output must be usable, got No space left on device\n",
    )  # fmt: skip


def test_program_interrupted_while_it_loads_says_so(environment, interrupts):
    code = """if True:
        import os, rlk_program, signal, sys
        class Interrupt:
            def find_spec(*_):
                os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Interrupt)
        rlk_program.main()
    """
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "rlk: interrupted\n")


def test_unknown_option_of_any_command_exits_two(invoke):
    result = invoke("list", "--colour")
    assert result.exit_code == 2
    assert "Error: No such option: --colour" in result.stderr


def test_import_rlk_alone_leaves_the_command_line_out(environment):
    code = "import rlk, sys; print(*sorted(sys.modules))"
    loaded = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert "rlk" in loaded.split()
    assert not {"typer", "rich", "triton", cli.__name__} & set(loaded.split())


@pytest.mark.skipif(GPU, reason="needs a machine without a GPU")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_program_without_gpu_runs_triton_in_the_interpreter(program):
    out, _ = program("env", "--json").communicate()
    facts = json.loads(out)
    assert facts["triton_interpreter"] is True
    assert facts["packages"]["tiny-operators"]["version"] == "1.2"


def test_program_output_to_a_pipe_has_no_control_characters(environment, program):
    environment["FORCE_COLOR"] = "1"
    running = program("list")
    out, err = running.communicate()
    assert running.returncode == 0
    assert cells(out, "twice")[1] == "tiny_operators"
    assert not [c for c in out + err if ord(c) < 32 and c != "\n"]


def test_help_of_the_program_names_every_command(invoke):
    listed = invoke("--help").stdout.split("Commands:")[1]
    assert [line.split()[0] for line in listed.splitlines() if line.strip()] == [
        "list", "show", "env", "doctor", "build", "cache", "bits", "check", "gate", "survey",
        "bench", "report",
    ]  # fmt: skip
