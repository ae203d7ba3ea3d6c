# SPDX-License-Identifier: Apache-2.0
"""A run of ci/gpu.sh by a Python that only notes what it is asked for."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OPERATORS = ("rms_norm", "adaln_mod_projection")
# Writes each file that it is told to, unless that is to fail.
PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$CALLS/calls"
if [ "$1" = -c ]; then printf '%s\\n' rms_norm adaln_mod_projection; fi
if [[ "$*" == "-m pytest "* ]]; then
    seen=present
    cp "${PYTHONPATH%%:*}/fla.py" "$CALLS" 2>/dev/null && seen=hidden
    echo "$*" >"$CALLS/fla-$seen"
    if [ -n "$ENDLESS" ]; then
        trap 'echo interrupted; exit 0' INT
        while :; do sleep 0.1; done
    fi
fi
while [ $# -gt 0 ]; do
    if [ "$1" = --json ]; then
        [[ -z "$BROKEN" || "$2" != *$BROKEN* ]] || exit 1
        echo "${CUBLAS_WORKSPACE_CONFIG:-}|$RLK_CALLERS_PYTHONPATH" >"$2"
    fi
    shift
done
"""


@pytest.fixture
def gpu_run(tmp_path):
    """Runs parts; the files that then lie in OUT_DIR."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def run(*parts, broken="", endless="", **variables):
        given = {f"RLK_GPU_{name.upper()}": value for name, value in variables.items()}
        own = {"PYTHON": str(python), "CALLS": str(tmp_path), "BROKEN": broken, "ENDLESS": endless}
        kept = {n: v for n, v in os.environ.items() if not n.startswith("RLK_GPU_")}
        command = ["bash", str(ROOT / "ci/gpu.sh"), str(tmp_path / "out")]
        command += [word for part in parts for word in ("--only", part)]
        paths = {"PYTHONPATH": "/libraries"}
        subprocess.run(command, env={**kept, **own, **paths, **given}, check=True)
        return {path.name for path in (tmp_path / "out").glob("*.json")}

    return run


def test_run_keeps_what_other_parts_operators_and_dtypes_left(gpu_run, tmp_path):
    gates = {f"gates-{backend}-{o}.json" for backend in ("cuda", "triton") for o in OPERATORS}
    assert gpu_run("gates") == gates
    first = gates | {"bench-rms_norm.json", "conventions-rms_norm.json"}
    assert gpu_run("bench", "conventions", operators="rms_norm") == first
    both = first | {"bench-rms_norm-float32.json"}
    assert gpu_run("bench", operators="rms_norm", dtypes="float32") == both
    everything = both | {"bench.json", "exact_grad.json"}
    assert gpu_run("bench", "exact_grad") == everything
    # A part that leaves nothing leaves nothing of an earlier run, and nothing else is touched.
    red = "gates-cuda-rms_norm"
    assert gpu_run("gates", operators="rms_norm", broken=red) == everything - {f"{red}.json"}
    assert (tmp_path / "out" / f"{red}.status").read_text().startswith("1 ")


def test_run_hands_operators_dtypes_and_rows_to_the_benchmark(gpu_run, tmp_path):
    gpu_run("bench", operators="a b", dtypes="bfloat16 float32", rows="1 1000", workers="3")
    calls = (tmp_path / "calls").read_text().splitlines()
    (bench,) = [call for call in calls if "rlk.cli bench" in call]
    options = "--rows 1 --rows 1000 --dtype bfloat16 --dtype float32 --jobs 3"
    name = "bench-a-b-bfloat16-float32"
    assert bench == f"-m rlk.cli bench a b {options} --json {tmp_path}/out/{name}.json"
    assert calls[-1] == f"ci/gpu_report.py table {tmp_path}/out build {name}"


def test_run_surveys_the_starved_product_in_a_process_of_its_own(gpu_run, tmp_path):
    names = {f"survey-{o}.json" for o in OPERATORS} | {"starved-adaln_mod_projection.json"}
    assert gpu_run("survey") == names
    texts = {name: (tmp_path / "out" / name).read_text().strip() for name in names}
    starved = texts.pop("starved-adaln_mod_projection.json")
    assert starved == ":0:0|/libraries"
    assert set(texts.values()) == {"|/libraries"}
    assert gpu_run("survey", operators="rms_norm") == names


def test_run_hides_fla_from_models_and_not_from_tests_of_its_norm(gpu_run, tmp_path):
    gpu_run("integration")
    with pytest.raises(ImportError, match="hidden"):
        exec((tmp_path / "fla.py").read_text())
    models, norm = ((tmp_path / f"fla-{seen}").read_text() for seen in ("hidden", "present"))
    assert "test_patch_gpu.py" in models
    assert "test_patch_fla.py" not in models
    report, test = norm.split()[-2:]
    assert report == f"{tmp_path}/out/integration-fla.xml"
    assert test == "packages/rlk-qwen3next/integration/test_patch_fla.py"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[-1].endswith("build integration integration-fla")


def test_run_profiles_alone_after_what_it_measures_and_only_when_asked(gpu_run, tmp_path):
    found = gpu_run("profile", "bench", "exact_grad", operators="a b", rows="7", workers="3")
    assert found == {"bench-a-b.json", "exact_grad.json", "profile-a-b.json"}
    calls = (tmp_path / "calls").read_text().splitlines()
    file = f"{tmp_path}/out/profile-a-b.json"
    assert calls[-2] == f"-m rlk.bench.profile a b --rows 7 --jobs 3 --json {file}"
    assert calls[-1].endswith("table " + f"{tmp_path}/out build bench-a-b exact_grad profile-a-b")
    (tmp_path / "calls").unlink()
    assert "profile.json" not in gpu_run(operators="")
    assert "rlk.bench.profile" not in (tmp_path / "calls").read_text()
    assert "profile.json" in gpu_run("profile")


def test_run_of_tests_that_do_not_end_is_interrupted_and_red(gpu_run, tmp_path):
    gpu_run("tests", endless="yes", tests_seconds="1")
    assert (tmp_path / "out" / "tests.log").read_text() == "interrupted\n"
    # Whatever pytest's own status is.
    assert (tmp_path / "out" / "tests.status").read_text().startswith("124 ")


@pytest.mark.parametrize("arguments", [(), ("out", "--only"), ("out", "--only", "speed")])
def test_run_of_no_known_part_is_refused(arguments, tmp_path):
    command = ["bash", str(ROOT / "ci/gpu.sh"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: gpu.sh OUT_DIR")
