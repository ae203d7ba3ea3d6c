# SPDX-License-Identifier: Apache-2.0
"""Records are read strictly, written alike, and bind to the sources that made them."""

import json
import sys
from importlib.resources import files

import jsonschema
import msgspec
import pytest

from rlk import environment
from rlk.cli.report_file import json_schema as report_schema
from rlk.errors import RlkError
from rlk.gates import cases, judge, summarise
from rlk.operator import Workload
from rlk.records import (
    Bench,
    BenchRow,
    KernelVersion,
    KernelVersions,
    Origin,
    Profile,
    ProfileRow,
    Source,
    VersionTime,
    decode,
    json_schema,
    load_folder,
    load_versions,
    origin,
    state,
    summary,
    write,
)
from rlk.test_support import tiny_operator

SCHEMA = json.loads((files("rlk") / "records" / "records.schema.json").read_bytes())
PACKAGES = {
    name: Source(version="1", commit="a" * 40, dirty=False, digest=letter * 64)
    for name, letter in (("rlk-core", "c"), ("rlk-demo", "d"), ("rlk-other", "e"))
}
ORIGIN = Origin(
    command="rlk bench", packages=PACKAGES, device="GPU", driver=None, compute_capability="9.0",
    python="3", torch="2", triton=None, cuda=None,
)  # fmt: skip
ROW = BenchRow(
    operator="demo", size="1x2", layout="packed", dtype="bfloat16", variant="cuda",
    forward_us=1.23456,
)  # fmt: skip
BENCH = Bench(origin=ORIGIN, method="graphs", rows=[ROW])


def test_schema_file_always_matches_the_structs():
    assert json_schema() == SCHEMA
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.Draft202012Validator.check_schema(report_schema())


def test_record_written_and_read_again_is_the_same_but_for_noise(tmp_path):
    write(tmp_path / "a.json", BENCH)
    text = (tmp_path / "a.json").read_bytes()
    jsonschema.validate(json.loads(text), SCHEMA)
    found = decode(text)
    assert found.origin == ORIGIN
    assert found.rows[0].forward_us == 1.235
    write(tmp_path / "a.json", found)
    assert (tmp_path / "a.json").read_bytes() == text


def test_profile_written_and_read_again_leaves_out_what_was_not_counted(tmp_path):
    row = ProfileRow(
        operator="demo", size="1x2", layout="packed", dtype="bfloat16", backend="cuda",
        direction="backward", launch=2, kernel="fold", grid="7x1x1", block="128x1x1",
        duration_us=12.34567, registers_per_thread=40, stall="wait", stalled_warps_per_issue=1.5,
    )  # fmt: skip
    write(tmp_path / "a.json", Profile(origin=ORIGIN, ncu="1", method="replay", rows=[row]))
    text = (tmp_path / "a.json").read_bytes()
    jsonschema.validate(json.loads(text), SCHEMA)
    (found,) = decode(text).rows
    assert (found.duration_us, found.registers_per_thread, found.dram_pct) == (12.35, 40, None)
    assert (found.launch, found.stall, found.stalled_warps_per_issue) == (2, "wait", 1.5)
    assert b"dram_pct" not in text
    with pytest.raises(RlkError, match="direction"):
        decode(text.replace(b"backward", b"sideward"))


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"schema": "rlk.bench/1"}, "$.schema"),
        ({"origin": {}}, "$.origin"),
        ({"rows": [{"operator": "demo"}]}, "$.rows[0]"),
        ({"more": 1}, "unknown field"),
    ],
)
def test_record_with_a_fault_is_refused_with_its_place(tmp_path, change, place):
    write(tmp_path / "a.json", BENCH)
    document = {**json.loads((tmp_path / "a.json").read_text()), **change}
    with pytest.raises(RlkError, match="must be a record of rlk, got: ") as caught:
        decode(json.dumps(document).encode(), "a.json")
    assert place in str(caught.value)


def test_record_is_current_until_core_or_its_package_changes():
    here = {name: source.digest for name, source in PACKAGES.items()}
    assert state(ORIGIN, "rlk-demo", here) == "current"
    assert state(ORIGIN, "rlk-demo", {**here, "rlk-other": "f" * 64}) == "current"
    assert state(ORIGIN, "rlk-demo", {**here, "rlk-demo": "f" * 64}) == "older"
    assert state(ORIGIN, "rlk-demo", {**here, "rlk-core": "f" * 64}) == "older"
    assert state(ORIGIN, "rlk-absent", here) == "older"


def test_record_without_a_digest_is_never_current():
    unknown = Source(version="1", commit=None, dirty=None)
    bare = Origin(
        **{
            **{name: getattr(ORIGIN, name) for name in ORIGIN.__struct_fields__},
            "packages": dict.fromkeys(PACKAGES, unknown),
        }
    )
    assert state(bare, "rlk-demo", dict.fromkeys(PACKAGES)) == "older"
    assert bare.dirty


def test_origin_of_this_process_binds_to_its_sources(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/rlk", "bench", "--json", "/somewhere/out.json"])
    made = origin()
    assert made.packages["rlk-core"].digest == environment.digests()["rlk-core"]
    assert made.command == "rlk bench --json out.json"


def test_report_of_gates_is_counted_by_judgment_and_status(tmp_path):
    operator = tiny_operator(
        "counted",
        oracle=lambda x, weight, *, factor: (x * weight, x.abs().amax(-1)),
        workloads=(Workload("somewhere", {"T": 3, "N": 5}),),
    )
    found = [
        record
        for case in cases([operator])
        if case.judgment in ("forward_accuracy", "forward_invariance")
        for record in judge(case)
    ]
    report = summarise(found, tier="short", seed=1, environment=environment.facts())
    counted = summary(report)
    assert sum(row.records for row in counted.rows) == len(found)
    # The oracle is of another formula: y is red, the saved peak is not.
    statuses = {(row.judgment, row.status) for row in counted.rows}
    assert ("forward_accuracy", "failed") in statuses
    assert ("forward_invariance", "failed") not in statuses
    assert not counted.passed
    assert not counted.interrupted
    cut = summarise(found, tier="short", seed=1, environment=environment.facts(), interrupted=True)
    assert summary(cut).interrupted
    write(tmp_path / "gates.json", counted)
    assert load_folder(tmp_path) == {"gates.json": counted}


def versions(*changes):
    """Versions of a kernel as JSON: two, and these changes to each."""
    kept = KernelVersion(
        operator="demo", kernel="fold", version=1, change="wider", verdict="kept", reason="faster",
        times=[VersionTime(size="1x2", dtype="bfloat16", predicted_us=(1.0, 2.0), measured_us=1.5)],
    )  # fmt: skip
    tried = KernelVersion(
        operator="demo", kernel="fold", version=2, change="narrower", verdict="dropped",
        reason="no room",
    )  # fmt: skip
    record = KernelVersions(
        device="GPU", method="graphs", serves={"fold": ["demo"]}, rows=[kept, tried]
    )
    document = msgspec.to_builtins(record)
    for row, change in zip(document["rows"], changes, strict=False):
        row.update(change)
    return document


def test_versions_of_kernels_are_read_as_they_are_written(tmp_path):
    path = tmp_path / "h200" / "kernel-versions.json"
    path.parent.mkdir()
    path.write_text(json.dumps(versions()))
    (found,) = load_versions(tmp_path).values()
    write(path, found)
    jsonschema.validate(json.loads(path.read_bytes()), SCHEMA)
    assert load_versions(tmp_path) == {"h200/kernel-versions.json": found}
    assert found.rows[0].times[0].predicted_us == (1.0, 2.0)
    # They are of many sources: no record that tools compare or publish.
    assert load_folder(tmp_path) == {}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            [{"times": []}],
            "version 1, kept, must have measured_us at each of its sizes, got 0 of 0",
        ),
        ([{"times": [{"size": "1x2", "dtype": "bfloat16"}]}], "got 0 of 1"),
        ([{}, {"verdict": "superseded"}], "version 2, superseded, must have measured_us"),
        ([{}, {"version": 1}], "fold: version must be above 1, the one before, got 1"),
        ([{"version": 3}], "fold: version must be above 3, the one before, got 2"),
        ([{"version": 0}], "$.rows[0].version"),
        ([{"verdict": "perhaps"}], "$.rows[0].verdict"),
        ([{"commit": "abc"}], "$.rows[0].commit"),
        ([{"more": 1}], "unknown field `more`"),
        ([{}, {"kernel": "fald"}], "serves must name demo for fald, got none"),
        ([{}, {"operator": "other"}], "serves must name other for fold, got none"),
    ],
)
def test_versions_of_kernels_with_a_fault_are_refused(tmp_path, changes, words):
    (tmp_path / "kernel-versions.json").write_text(json.dumps(versions(*changes)))
    with pytest.raises(RlkError, match="must be versions of kernels, got: ") as caught:
        load_versions(tmp_path)
    assert words in str(caught.value)
