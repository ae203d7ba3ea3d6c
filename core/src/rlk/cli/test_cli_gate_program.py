# SPDX-License-Identifier: Apache-2.0
"""`rlk gate` as a program of its own: real judgments, interrupts, several processes."""

import contextlib
import json
import os
import signal

CASE = "twice/golden/forward_accuracy/bfloat16"


def test_program_real_judge_passes_a_right_operator(program, report):
    case = "twice/golden/forward_invariance/float32"
    result = program("gate", "--case", case, "--json", report.path)
    out, err = result.communicate()
    assert result.returncode == 0, err
    assert report.read()["passed"]
    assert not [c for c in out + err if ord(c) < 32 and c != "\n"]


def test_program_interrupted_by_its_user_leaves_a_report(program, report):
    running = program("gate", "twice", "--backend", "golden", "--json", report.path)
    while not running.stderr.readline().startswith("3 of "):
        assert running.poll() is None
    running.send_signal(signal.SIGINT)
    out, err = running.communicate()
    assert (running.returncode, err.count("Traceback")) == (1, 0)
    document = report.read()
    assert document["status"] == "interrupted"
    assert len(document["records"]) >= 3
    assert "interrupted: " in out


def test_program_judges_the_same_in_several_processes(program, tmp_path):
    found = []
    for jobs in (1, 3):
        path = tmp_path / f"{jobs}.json"
        running = program("gate", "twice", "--backend", "golden", "--json", path, "--jobs", jobs)
        _, err = running.communicate()
        assert running.returncode == 0, err
        found.append(json.loads(path.read_text())["records"])
    assert len(found[0]) > 100
    assert found[0] == found[1]


def test_program_interrupted_in_several_processes_leaves_a_report(program, report):
    running = program(
        "gate", "twice", "--backend", "golden", "--json", report.path, "--jobs", 2,
        process_group=0,
    )  # fmt: skip
    while not running.stderr.readline().startswith("3 of "):
        assert running.poll() is None
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate()
    assert (running.returncode, err.count("Traceback")) == (1, 0)
    assert len(report.read()["records"]) >= 3
    assert "interrupted: " in out


def test_program_whose_process_ends_before_its_case_says_which(program, report, tmp_path):
    end = "import os, sys\nif 'spawn_main' in str(sys.orig_argv): os._exit(7)\n"
    (tmp_path / "sitecustomize.py").write_text(end)
    running = program("gate", "twice", "--json", report.path, "--jobs", 2, beside=tmp_path)
    _, err = running.communicate()
    assert running.returncode == 2, err
    assert "a process must live until its case ends" in err
    assert "rlk gate --case twice/" in err


def test_program_on_a_terminal_draws_a_bar(program):
    screen, terminal = os.openpty()
    running = program("gate", "--case", CASE, stderr=terminal)
    os.close(terminal)
    drawn = b""
    with os.fdopen(screen, "rb", buffering=0) as reader, contextlib.suppress(OSError):
        while part := reader.read(4096):  # OSError: the other end is closed
            drawn += part
    running.communicate()
    assert running.returncode == 0
    assert "0/1" in drawn.decode()
    assert CASE in drawn.decode()
