# SPDX-License-Identifier: Apache-2.0
"""What ci/gpu_report.py calls red: faults planted into what parts of a run left."""

import importlib.util
import json
from types import SimpleNamespace

import bench_limits
import gpu_report
import pytest
import torch
from msgspec.structs import replace

from rlk import registry
from rlk.cuda import toolchain
from rlk.records import Bench, BenchRow, Origin, Profile, ProfileRow, Source, write

ORIGIN = Origin(
    command="rlk bench", packages={"rlk-core": Source(version="1", commit=None, dirty=None)},
    device=bench_limits.load().device, driver=None, compute_capability="9.0", python="3",
    torch="2", triton=None, cuda=None,
)  # fmt: skip
NAME, SIZE = "rms_norm_gated", "262144x128"


def times(variant, forward, both, **changes):
    row = BenchRow(
        operator=NAME, size=SIZE, layout="contiguous", dtype="bfloat16", variant=variant,
        ours=variant in bench_limits.OURS, version="1", forward_us=forward, both_us=both,
        both_ratio=both / 100, forward_spread_us=0.1, backward_spread_us=0.1,
    )  # fmt: skip
    return replace(row, **changes)


ROWS = [
    times("floor", 50.0, 100.0, both_ratio=None, version="unroll 1"),
    times("cuda", 55.0, 130.0),
    times("triton", 70.0, 150.0),
    times("FLA", 60.0, 140.0),
]
BENCH = Bench(origin=ORIGIN, method="graphs", rows=ROWS)


def with_row(row):
    return replace(BENCH, rows=[row if row.variant == r.variant else r for r in ROWS])


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """Judges a benchmark beside kept records; whether it passed, the summary and its lines."""

    def run(record, *kept):
        monkeypatch.setattr(gpu_report, "RECORDS", tmp_path / "records")
        (tmp_path / "records").mkdir(exist_ok=True)
        for place, one in enumerate(kept):
            write(tmp_path / "records" / f"{place}.json", one)
        write(tmp_path / "bench.json", record)
        (tmp_path / "bench.status").write_text("0 1")
        passed, _, _, text = gpu_report.row(tmp_path, "bench")
        return passed, text, (tmp_path / "bench.limits").read_text().splitlines()

    return run


def test_bench_prints_each_limit_and_a_miss_is_not_red(judged, capsys, tmp_path):
    passed, text, lines = judged(BENCH)
    assert passed
    met = "met     bound rms_norm_gated 262144x128 bfloat16: "
    floor = "cuda 1.1, triton 1.4 of 50 us"
    assert f"{met}forward <= 1.25x floor: {floor}" in lines
    assert f"{met}both <= 1x FLA: cuda 0.929, triton 1.07 of 140 us" in lines
    missed = "missed  aim rms_norm_gated 262144x128 bfloat16: both"
    assert f"{missed} <= 1.25x floor: cuda 1.3, triton 1.5 of 100 us" in lines
    assert f"{missed} <= 0.3x the fastest peer: cuda 0.929, triton 1.07 of 140 us" in lines
    assert any(line.startswith("not measured  bound") and "torch.compile" in line for line in lines)
    counts = [sum(line.startswith(word) for line in lines) for word in ("met", "missed", "not ")]
    assert "limits: {} met, {} missed, {} not measured; 0 losses".format(*counts) in text
    assert gpu_report.table(tmp_path, ["bench"]) == 0
    assert f"{met}forward <= 1.25x floor: {floor}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "lost"),
    [
        (times("cuda", 60.0, 142.0), []),
        (
            times("cuda", 62.0, 130.0),
            ["forward / FLA 0.917 -> 1.03", "forward / floor 1.1 -> 1.24"],
        ),
        (times("triton", 70.0, 170.0), ["both / FLA 1.07 -> 1.21", "both / floor 1.5 -> 1.7"]),
        # Noise of this run, three spreads of it.
        (times("cuda", 62.0, 130.0, forward_spread_us=3.0), []),
        # A peer or probe that is slower is no loss; nor is another version, which is another peer.
        (times("FLA", 90.0, 190.0), []),
        (times("FLA", 40.0, 90.0, version="2"), []),
        (times("FLA", 40.0, 140.0), ["cuda: forward / FLA", "triton: forward / FLA"]),
    ],
)
def test_bench_that_lost_a_tenth_of_a_kept_ratio_is_red(judged, changed, lost):
    passed, text, lines = judged(with_row(changed), BENCH)
    told = [line for line in lines if line.startswith("lost")]
    assert passed is not bool(lost)
    assert f"; {len(lost)} losses" in text
    assert len(told) == len(lost)
    assert all(words in line for words, line in zip(lost, told, strict=True))


def test_bench_of_another_gpu_is_held_to_no_limit_and_no_record(judged):
    other = replace(with_row(times("cuda", 99.0, 199.0)), origin=replace(ORIGIN, device="another"))
    passed, _, lines = judged(other, BENCH)
    assert passed
    assert lines == []


@pytest.mark.parametrize(
    "record",
    [
        replace(BENCH, interrupted=True),
        replace(BENCH, rows=[]),
        with_row(times("cuda", 55.0, 130.0, both_us=None, both_ratio=None, verdict="failed")),
    ],
    ids=["interrupted", "empty", "ours without a time"],
)
def test_bench_that_is_not_whole_is_red(judged, record):
    assert not judged(record)[0]


def test_limits_of_a_pattern_are_of_each_size():
    spelled = bench_limits.spelled("{1,8}x3 stream={a,b}")
    assert spelled == ["1x3 stream=a", "1x3 stream=b", "8x3 stream=a", "8x3 stream=b"]


def left(tmp_path, name, content):
    (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / f"{name}.status").write_text("0 1")
    (tmp_path / f"{name}.log").touch()
    return gpu_report.row(tmp_path, name)[0]


ABSENT = {"other": "vLLM", "missing": "not installed"}
COMPARED = {"other": "Liger", "missing": None}


@pytest.mark.parametrize(
    ("rows", "passed"),
    [
        ([ABSENT, COMPARED, {"other": "FLA"}], True),
        ([ABSENT, COMPARED, {"other": "FLA", "missing": "TypeError: no such argument"}], False),
        ([ABSENT], False),
        ([], False),
    ],
)
def test_conventions_red_if_a_function_failed_whose_library_is_there(tmp_path, rows, passed):
    assert left(tmp_path, "conventions-a", {"rows": rows}) is passed


def profile(*backends, operator=NAME, **changes):
    rows = [
        ProfileRow(
            operator=operator, size=SIZE, layout="contiguous", dtype="bfloat16", backend=backend,
            direction="forward", launch=1, kernel="row", grid="1x1x1", block="1x1x1",
        )
        for backend in backends
    ]  # fmt: skip
    return replace(Profile(origin=ORIGIN, ncu="2025.3", method="replay", rows=rows), **changes)


@pytest.fixture
def two_operators(monkeypatch):
    """Names of installed operators, which this environment need not have."""
    rows = [SimpleNamespace(name=backend) for backend in ("cuda", "triton", "golden")]
    found = {name: SimpleNamespace(name=name, backends=rows) for name in (NAME, "rms_norm")}
    monkeypatch.setattr(registry, "operators", lambda: found)
    monkeypatch.setattr(registry, "find", found.__getitem__)
    return tuple(found)


@pytest.mark.usefixtures("two_operators")
@pytest.mark.parametrize(
    ("name", "record", "passed", "words"),
    [
        (f"profile-{NAME}", profile("cuda", "triton"), True, "2 launches by ncu 2025.3 on"),
        (f"profile-{NAME}", profile("cuda"), False, f"no triton of {NAME}"),
        (f"profile-{NAME}", profile("cuda", "triton", interrupted=True), False, "2 launches"),
        (f"profile-{NAME}", profile("cuda", "triton", operator="rms_norm"), False, "no cuda of"),
        (f"profile-{NAME}-rms_norm", profile("cuda", "triton"), False, "no cuda of rms_norm"),
        # Without names it was to be of every operator.
        ("profile", profile("cuda", "triton"), False, "no cuda of "),
        (f"profile-{NAME}", BENCH, False, "must be of rlk.bench.profile, got Bench"),
    ],
)
def test_profile_red_unless_each_backend_left_a_launch(tmp_path, name, record, passed, words):
    write(tmp_path / f"{name}.json", record)
    (tmp_path / f"{name}.status").write_text("0 1")
    (tmp_path / f"{name}.log").touch()
    found, _, _, text = gpu_report.row(tmp_path, name)
    assert found is passed
    assert words in text


def test_profile_of_every_operator_is_of_each_backend_of_ours(tmp_path, two_operators):
    rows = [row for name in two_operators for row in profile("cuda", "triton", operator=name).rows]
    write(tmp_path / "profile.json", profile(rows=rows))
    assert gpu_report.judge_profile(tmp_path, "profile")[0]


@pytest.mark.parametrize(
    ("parts", "lack"),
    [
        (["profile"], "needs ncu, got none; install Nsight Compute or leave out that part"),
        (["bench"], None),
    ],
)
def test_machine_without_ncu_cannot_run_the_profile_alone(tmp_path, monkeypatch, parts, lack):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(toolchain, "nvcc_missing", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert gpu_report.lacking(parts) == lack
    (tmp_path / "ncu").touch(mode=0o755)
    assert gpu_report.lacking(parts) is None


@pytest.mark.parametrize(
    ("document", "passed"),
    [
        ({"interrupted": False, "rows": [{}, {"verdict": "failed"}]}, True),
        ({"interrupted": False, "rows": [{}, {"verdict": "not applicable"}]}, False),
        ({"interrupted": False, "rows": []}, False),
        ({"interrupted": True, "rows": [{}]}, False),
    ],
)
def test_starved_product_that_was_not_tried_is_red(tmp_path, document, passed):
    assert left(tmp_path, "starved-demo", document) is passed


@pytest.mark.parametrize(("status", "passed"), [("0", True), ("124", False)])
def test_tests_that_were_cut_off_are_red_though_none_failed(tmp_path, status, passed):
    (tmp_path / "tests.xml").write_text("<testsuites><testcase/></testsuites>")
    (tmp_path / "tests.log").write_text("== 1 passed in 560.00s ==\n")
    (tmp_path / "tests.status").write_text(f"{status} 560")
    found, *_, text = gpu_report.row(tmp_path, "tests")
    assert found is passed
    assert passed or text.startswith("exit status 124: ")
