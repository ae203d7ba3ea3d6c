# SPDX-License-Identifier: Apache-2.0
"""What is read from the CSV of Nsight Compute, and what is said where it refuses."""

import sys

import pytest

from rlk.bench import ncu
from rlk.errors import RlkError
from rlk.test_support.fake_ncu import fake_ncu, raw_page

TIME, READ = "gpu__time_duration.sum", "dram__bytes_read.sum"
SHARED, HITS = "launch__shared_mem_per_block", "lts__t_sector_hit_rate.pct"


def test_launch_of_a_raw_page_has_its_step_shape_and_fields():
    stalls = dict.fromkeys(ncu.STALLS.values(), "inst")
    metrics = {TIME: "ns", READ: "byte", SHARED: "byte/block", HITS: "%", **stalls}
    waits = ["0.5", "1.25", "0.1", "0", "0.2", "0.3", "n/a", "0"]
    (launch,) = ncu.launches(
        raw_page(metrics, ["1,024,500", "3,145,728", "33,792", "49.50", *waits])
    )
    assert (launch.step, launch.kernel) == (7, "row_kernel")
    assert (launch.grid, launch.block) == ("2048x3x1", "128x1x1")
    assert launch.values == {
        "duration_us": 1024.5, "dram_read_mib": 3.0, "l2_hit_pct": 49.5,
        "shared_bytes_per_block": 33792, "stall": "barrier", "stalled_warps_per_issue": 1.25,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("metric", "unit", "field", "value"),
    [
        (TIME, "nsecond", "duration_us", 0.0025),
        (TIME, "usecond", "duration_us", 2.5),
        (TIME, "msecond", "duration_us", 2500.0),
        (TIME, "second", "duration_us", 2.5e6),
        (READ, "Kbyte", "dram_read_mib", 2500 / 2**20),
        (READ, "Mbyte", "dram_read_mib", 2.5e6 / 2**20),
        (READ, "Gbyte", "dram_read_mib", 2.5e9 / 2**20),
        (SHARED, "Kbyte/block", "shared_bytes_per_block", 2500),
        ("launch__registers_per_thread", "register/thread", "registers_per_thread", 2),
        ("launch__waves_per_multiprocessor", "", "waves_per_sm", 2.5),
    ],
)
def test_value_in_any_unit_of_its_kind_is_in_that_of_its_field(metric, unit, field, value):
    (launch,) = ncu.launches(raw_page({metric: unit}, ["2.5"]))
    assert launch.values == {field: value}


@pytest.mark.parametrize("absent", ["", "n/a", "nan", "(!) nan", "inf"])
def test_value_that_was_not_counted_is_absent_whatever_its_unit(absent):
    found = list(ncu.launches(raw_page({TIME: "hour", HITS: "%"}, [absent, "5"], [absent, absent])))
    assert [launch.values for launch in found] == [{"l2_hit_pct": 5.0}, {}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (raw_page({TIME: "hour"}, ["2"]), "gpu__time_duration.sum must be in ns, .*, got 'hour'"),
        (raw_page({HITS: ""}, ["2"]), "sector_hit_rate.pct must be in %, got ''"),
        (
            raw_page({TIME: "ns"}, ["2", "3"]),
            "must list 14 columns, Kernel Name among them, got '0,",
        ),
        (
            raw_page({TIME: "ns"}).replace("Kernel Name", "Name"),
            "must list 14 columns, Kernel Name",
        ),
        ("==WARNING== No kernels were profiled.\n", "must list 0 columns"),
    ],
)
def test_csv_of_another_form_is_refused_and_never_guessed(text, words):
    with pytest.raises(RlkError, match=words):
        list(ncu.launches(text))


def test_launch_outside_of_a_range_belongs_to_no_step():
    text = raw_page({TIME: "ns"}, ["2"]).replace(ncu.STEP, "other-")
    assert [launch.step for launch in ncu.launches(text)] == [None]


def test_ncu_is_asked_for_base_units_and_only_what_is_in_ranges(tmp_path, monkeypatch):
    said = fake_ncu(tmp_path, monkeypatch, raw_page({TIME: "ns"}, ["2"]))
    assert ncu.version() == "2025.3.1.0"
    (launch,) = ncu.launches(ncu.profiled(["child", "--child"]))
    assert launch.values == {"duration_us": 0.002}
    (call,) = said()
    for words in ("--print-units base", "--page raw", "--nvtx", "--profile-from-start off"):
        assert words in call
    assert call.endswith(" child --child")
    assert set(ncu.METRICS.values()) < set(call.partition("--metrics ")[2].split()[0].split(","))


def test_machine_without_ncu_is_told_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RlkError, match="^profile: needs ncu, got none; install Nsight Compute$"):
        ncu.version()


REFUSED = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access counters"
ENDED = "==ERROR== The application returned an error code (1)."


@pytest.mark.parametrize(
    ("log", "status", "output", "last"),
    [
        (f"==PROF== Connected\n{REFUSED}\n==PROF== Disconnected\n", 1, "", REFUSED),
        (f"{REFUSED}\n==WARNING== No kernels were profiled.\n", 0, "", REFUSED),
        ("==WARNING== No kernels were profiled.\n", 0, "", "No kernels were profiled."),
        (f"==PROF== Connected\n{ENDED}\n", 1, "Traceback\nValueError: no\n", "ValueError: no"),
        (raw_page({TIME: "ns"}, ["2"]) + f"{REFUSED}\n", 0, "", REFUSED),
        (raw_page({TIME: "ns"}, ["2"]), 3, "killed\n", "killed"),
        ("", 9, "", "no word"),
    ],
)
def test_ncu_that_fails_is_quoted_and_leaves_no_number(
    tmp_path, monkeypatch, log, status, output, last
):
    fake_ncu(tmp_path, monkeypatch, log, status=status, output=output)
    with pytest.raises(RlkError) as caught:
        ncu.profiled(["child"])
    assert str(caught.value).startswith(f"profile: ncu must finish, got exit status {status}: ")
    assert str(caught.value).endswith(last)


def test_metric_that_a_gpu_lacks_is_left_out_and_the_others_are_counted(tmp_path, monkeypatch):
    tensor = ncu.METRICS["tensor_pct"]
    said = fake_ncu(tmp_path, monkeypatch, raw_page({TIME: "ns"}, ["2"]), lacks=tensor)
    assert [launch.values for launch in ncu.launches(ncu.profiled(["child"]))] == [
        {"duration_us": 0.002}
    ]
    first, second = said()
    assert tensor in first
    assert tensor not in second
    assert TIME in second


def test_command_that_fails_under_ncu_is_quoted(tmp_path, monkeypatch):
    fake_ncu(tmp_path, monkeypatch, f"{ENDED}\n", runs=True)
    with pytest.raises(RlkError, match="got exit status 5: this is why$"):
        ncu.profiled([sys.executable, "-c", "print('this is why'); raise SystemExit(5)"])
