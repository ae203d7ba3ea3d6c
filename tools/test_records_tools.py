# SPDX-License-Identifier: Apache-2.0
"""Which records may be kept, and what counts as a difference between two."""

import shutil
import subprocess

import compare_records
import publish_records
import pytest
from msgspec.structs import replace

from rlk.records import (
    Bench,
    BenchRow,
    ExactGrad,
    ExactGradRow,
    GateRow,
    GateSummary,
    Install,
    InstallRow,
    Origin,
    Profile,
    ProfileRow,
    Source,
    Survey,
    SurveyRow,
    load_folder,
    write,
)

SOURCE = Source(version="1", commit="a" * 40, dirty=False, digest="b" * 64)
ORIGIN = Origin(
    command="rlk", packages={"rlk-core": SOURCE}, device="GPU", driver=None,
    compute_capability="9.0", python="3", torch="2", triton=None, cuda=None,
)  # fmt: skip
ROW = BenchRow(
    operator="demo", size="1x2", layout="packed", dtype="bfloat16", variant="cuda",
    forward_us=100.0, forward_spread_us=1.0, both_us=200.0, host_us=20.0,
)  # fmt: skip
BENCH = Bench(origin=ORIGIN, method="graphs", rows=[ROW])
SURVEY = Survey(
    origin=ORIGIN,
    seed=1,
    rows=[
        SurveyRow(
            operator="demo", size="1x2", dtype="bfloat16", variant="cuda", rows_alone={"y": 0}
        )
    ],
)
INSTALL = Install(
    origin=ORIGIN,
    wheels={"rlk_core-1-py3-none-any.whl": "d" * 64},
    rows=[
        InstallRow(operator="demo", way="prebuilt", backend="cuda", results=1, digest="e" * 64),
    ],
)

COST = ExactGrad(
    origin=ORIGIN,
    wrong=[],
    rows=[
        ExactGradRow(
            operator="demo", size="1x2", rows=1, columns=2, dtype="bfloat16", rounding_us=1.0,
            rounding_spread_us=0.1, exact_us=1.01, exact_spread_us=0.1, overhead=0.01,
            end_of_block_host_us=50.0, state_bytes=416, rounding_peak_bytes=1,
            exact_peak_bytes=2, end_of_block_peak_bytes=3,
        )
    ],
)  # fmt: skip


PROFILE = Profile(
    origin=ORIGIN,
    ncu="2025.3",
    method="replay",
    rows=[
        ProfileRow(
            operator="demo", size="1x2", layout="packed", dtype="bfloat16", backend="cuda",
            direction="forward", launch=1, kernel="row", grid="7x1x1", block="128x1x1",
            duration_us=100.0, dram_pct=80.0, registers_per_thread=40,
        )
    ],
)  # fmt: skip


def gates(judgment, status="passed", origin=ORIGIN, tier="full"):
    row = GateRow(
        operator="demo", bits_version=1, backend="cuda", judgment=judgment, status=status, records=4
    )
    passed = status == "passed"
    return GateSummary(origin=origin, tier=tier, seed=1, passed=passed, rows=[row])


@pytest.fixture
def publish(tmp_path):
    """Writes records to a folder and publishes it."""

    def run(**records):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        (tmp_path / "out").mkdir()
        for name, record in records.items():
            write(tmp_path / "out" / f"{name}.json", record)
        return publish_records.main([str(tmp_path / "out"), str(tmp_path / "kept")])

    return run


def test_publish_puts_gates_together_and_keeps_the_others(publish, tmp_path):
    judged = {"a": gates("layout"), "b": gates("repeatable", "failed")}
    others = {"wheels": INSTALL, "cost": COST, "limits": PROFILE}
    assert publish(**judged, survey=SURVEY, bench=BENCH, **others) == 0
    kept = load_folder(tmp_path / "kept")
    single = {"install.json": INSTALL, "exact_grad.json": COST, "profile.json": PROFILE}
    assert kept.keys() == {"gates.json", "survey.json", "bench.json", *single}
    assert {name: kept[name] for name in single} == single
    assert [row.judgment for row in kept["gates.json"].rows] == ["layout", "repeatable"]
    assert not kept["gates.json"].passed
    assert kept["bench.json"] == BENCH


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (replace(SOURCE, dirty=True), "must be of sources that are committed, got rlk-core"),
        (replace(SOURCE, dirty=None), "must be of sources that are committed"),
        (replace(SOURCE, digest=None), "must be of sources that are committed"),
        (replace(SOURCE, digest="c" * 64), "must be of the sources of the others"),
    ],
)
def test_publish_refuses_sources_that_are_not_committed_or_differ(publish, capsys, record, words):
    other = replace(ORIGIN, packages={"rlk-core": record})
    assert publish(a=gates("layout"), b=gates("repeatable", origin=other)) == 2
    assert words in capsys.readouterr().err


def test_publish_takes_sources_of_one_digest_at_two_commits(publish, tmp_path):
    later = replace(ORIGIN, packages={"rlk-core": replace(SOURCE, commit="d" * 40)})
    assert publish(a=gates("layout"), b=gates("repeatable", origin=later)) == 0
    assert load_folder(tmp_path / "kept")["gates.json"].origin == ORIGIN


@pytest.mark.parametrize("part", ["device", "driver", "compute_capability", "torch"])
def test_publish_refuses_records_of_two_machines(publish, capsys, part):
    other = replace(ORIGIN, **{part: "another"})
    assert publish(a=gates("layout"), b=gates("repeatable", origin=other)) == 2
    assert f"must be of the machine of the others, got {part} another" in capsys.readouterr().err


def test_publish_refuses_a_record_that_names_no_sources(publish, capsys):
    assert publish(a=gates("layout", origin=replace(ORIGIN, packages={}))) == 2
    assert "must be of sources that are committed, got none named" in capsys.readouterr().err


def test_publish_refuses_what_is_missing_interrupted_or_mixed(publish, capsys, tmp_path):
    for number, record in enumerate((COST, SURVEY, gates("layout"))):
        assert publish(**{f"a{number}": replace(record, interrupted=True)}) == 2
        assert "must be of a whole run" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert publish_records.main([str(tmp_path / "empty"), str(tmp_path / "kept")]) == 2
    assert publish_records.main([str(tmp_path / "absent"), str(tmp_path / "kept")]) == 2
    assert publish_records.main(["one"]) == 2
    assert not (tmp_path / "kept").exists()
    with pytest.raises(Exception, match="of one tier and seed"):
        publish_records.together([gates("layout"), gates("layout", tier="short")])


def test_publish_keeps_the_operator_at_which_a_run_was_cut_off_in_a_file_that_says_so(
    publish, capsys, tmp_path
):
    cut = replace(BENCH, interrupted=True)
    both = replace(cut, rows=[*of_operator("whole", BENCH).rows, *BENCH.rows])
    assert publish(a=both, b=of_operator("other", BENCH)) == 0
    kept = load_folder(tmp_path / "kept")
    assert kept["bench-demo.json"] == cut
    assert {row.operator for row in kept["bench.json"].rows} == {"whole", "other"}
    assert not kept["bench.json"].interrupted
    assert publish(a=cut, b=BENCH) == 2
    assert "must have measured demo" in capsys.readouterr().err
    other_dtype = replace(cut, rows=[replace(row, dtype="float32") for row in cut.rows])
    assert publish(a=cut, b=other_dtype) == 2
    assert "b.json must not be cut off at demo, as another record is" in capsys.readouterr().err
    assert publish(a=replace(cut, rows=[])) == 2
    assert "a.json, interrupted, must hold a row, got none" in capsys.readouterr().err


def told(command, record):
    return replace(record, origin=replace(record.origin, command=command))


def of_operator(name, record):
    rows = [replace(row, operator=name) for row in record.rows]
    program = "survey" if record.rows == SURVEY.rows else "bench"
    return told(f"rlk {program} {name} --jobs 3 --json {name}.json", replace(record, rows=rows))


def of_variant(variant, **changes):
    return replace(SURVEY, rows=[replace(SURVEY.rows[0], variant=variant, **changes)])


def test_publish_joins_what_two_processes_surveyed_of_one_operator(publish, tmp_path):
    absent = of_variant("starved", verdict="not applicable", reason="it needs a setting")
    first = replace(SURVEY, rows=SURVEY.rows + absent.rows)
    measured = of_variant("starved")
    first, measured = (told("rlk survey demo", record) for record in (first, measured))
    for order in ((first, measured), (measured, first)):
        assert publish(**dict(zip("ab", order, strict=True))) == 0
        kept = load_folder(tmp_path / "kept")["survey.json"]
        assert {row.variant: row.verdict for row in kept.rows} == {
            "cuda": "measured",
            "starved": "measured",
        }
        assert kept.origin.command == "rlk survey demo"


def test_publish_keeps_what_each_run_was_asked_for(publish, tmp_path):
    rows, dtype = " --rows 7", " --dtype float32"
    first = told(f"rlk bench demo other{rows}; rlk bench more", BENCH)
    other = replace(BENCH, rows=[replace(ROW, dtype="float32")])
    assert publish(a=first, b=told(f"rlk bench demo --jobs 3{dtype} --json b.json", other)) == 0
    kept = load_folder(tmp_path / "kept")["bench.json"]
    assert kept.origin.command == (
        f"rlk bench demo other{rows}; rlk bench more; rlk bench demo{dtype}"
    )
    assert [row.dtype for row in kept.rows] == ["bfloat16", "float32"]
    assert publish(a=BENCH, b=replace(BENCH, rows=[replace(ROW, size="3x4"), ROW])) == 2


def test_publish_refuses_two_reports_of_one_judgment(publish, capsys):
    assert publish(a=gates("layout"), b=gates("layout", "failed")) == 2
    words = "must have judged demo on cuda by layout once, got two"
    assert words in capsys.readouterr().err


def test_publish_joins_records_that_share_the_operators(publish, tmp_path):
    surveys = {name: of_operator(name, SURVEY) for name in ("a", "b")}
    assert publish(**surveys, c=of_operator("c", BENCH), d=of_operator("d", BENCH)) == 0
    kept = load_folder(tmp_path / "kept")
    assert [row.operator for row in kept["survey.json"].rows] == ["a", "b"]
    assert kept["survey.json"].origin.command == "rlk survey a b"
    assert kept["bench.json"].origin.command == "rlk bench c d"


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (SURVEY, "rlk survey must have measured demo 1x2 bfloat16 cuda once"),
        (replace(of_operator("b", SURVEY), seed=2), "must be made in one way"),
        (
            replace(of_operator("b", SURVEY), origin=replace(ORIGIN, device="another")),
            "must be of the machine of the others",
        ),
    ],
)
def test_publish_refuses_to_join_what_is_no_part_of_one_run(publish, capsys, other, words):
    assert publish(a=SURVEY, b=other) == 2
    assert words in capsys.readouterr().err


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    """Has this checkout be of some source, at its commit, with some files changed since."""

    def be(source, *changed):
        root = tmp_path / "checkout"
        shutil.rmtree(root, ignore_errors=True)
        for path in ("docs/records/a.json", "README.md", "core/a.py"):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text("before")
        settings = ["-c", "user.name=a", "-c", "user.email=a@b"]
        for words in (["init", "-q"], ["add", "."], [*settings, "commit", "-qm", "all"]):
            subprocess.run(["git", *words], cwd=root, check=True)
        for path in changed:
            (root / path).write_text("after")
        monkeypatch.setattr(publish_records, "ROOT", root)
        head = publish_records.git(root, "rev-parse", "HEAD")
        source = replace(source, commit=source.commit and head, dirty=bool(changed))
        here = replace(ORIGIN, packages={"rlk-core": source})
        monkeypatch.setattr(publish_records, "origin", lambda: here)
        return head

    return be


@pytest.mark.parametrize(
    ("here", "changed", "status"),
    [
        (SOURCE, [], 0),
        (SOURCE, ["docs/records/a.json", "docs/records/new.json", "README.md"], 0),
        (SOURCE, ["docs/records/a.json", "core/a.py"], 2),
        (SOURCE, ["core/new.py"], 2),
        (replace(SOURCE, digest="c" * 64), [], 2),
        (replace(SOURCE, commit=None), [], 2),
    ],
)
@pytest.mark.parametrize("known", [False, True], ids=["no history", "a dirty tree"])
def test_publish_believes_sources_by_their_digest(
    publish, checkout, tmp_path, here, changed, status, known
):
    head = checkout(here, *changed)
    made = replace(SOURCE, commit=head if known else None, dirty=True if known else None)
    record = replace(BENCH, origin=replace(ORIGIN, packages={"rlk-core": made}))
    assert publish(bench=record) == status
    if status == 0:
        (source,) = load_folder(tmp_path / "kept")["bench.json"].origin.packages.values()
        assert source == replace(SOURCE, commit=head)


def test_publish_never_moves_a_record_to_another_commit(publish, checkout):
    checkout(SOURCE)
    other = replace(SOURCE, dirty=True)
    assert publish(bench=replace(BENCH, origin=replace(ORIGIN, packages={"rlk-core": other}))) == 2


def test_publish_refuses_two_runs_of_installed_wheels(publish, capsys):
    assert publish(a=INSTALL, b=INSTALL) == 2
    assert "must hold one record for install.json, got 2" in capsys.readouterr().err


def changed(**values):
    return replace(BENCH, rows=[replace(ROW, **values)])


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (changed(forward_us=103.0, both_us=206.0, host_us=90.0), []),
        (changed(forward_us=130.0), ["forward_us 100 -> 130 (+30.0 %)"]),
        # Three spreads of the wider run.
        (changed(forward_us=130.0, forward_spread_us=11.0), []),
        (changed(both_us=150.0), ["both_us 200 -> 150 (-25.0 %)"]),
        (changed(forward_us=None), ["forward_us 100.0 -> None"]),
        (changed(forward_us=0.0), ["forward_us 100 -> 0 (-100.0 %)"]),
        (
            changed(verdict="failed", reason="red"),
            ["verdict measured -> failed", "reason None -> red"],
        ),
        (changed(variant="triton"), ["only in the first", "only in the second"]),
    ],
)
def test_compare_times_tells_more_than_noise(other, found):
    told = list(compare_records.differences(BENCH, other))
    assert len(told) == len(found)
    assert all(words in line for words, line in zip(found, told, strict=True))


def test_compare_values_and_gates_must_be_equal():
    noise = {"exact_us": 1.02, "overhead": 0.02}
    dearer = replace(COST, rows=[replace(COST.rows[0], exact_peak_bytes=4, **noise)])
    (line,) = compare_records.differences(COST, dearer)
    assert "exact_peak_bytes 2 -> 4" in line
    differing = replace(SURVEY, rows=[replace(SURVEY.rows[0], rows_alone={"y": 1})])
    (line,) = compare_records.differences(SURVEY, differing)
    assert "rows_alone {'y': 0} -> {'y': 1}" in line
    failed = list(compare_records.differences(gates("layout"), gates("layout", "failed")))
    assert len(failed) == 2


def test_compare_launches_tells_times_and_what_the_compiler_decided():
    def of(**values):
        return replace(PROFILE, rows=[replace(PROFILE.rows[0], **values)])

    noise = of(duration_us=104.0, dram_pct=70.0, stall="wait")
    assert list(compare_records.differences(PROFILE, noise)) == []
    (line,) = compare_records.differences(PROFILE, of(duration_us=120.0))
    assert line.endswith("packed bfloat16 cuda forward 1: duration_us 100 -> 120 (+20.0 %)")
    (line,) = compare_records.differences(PROFILE, of(registers_per_thread=48))
    assert line.endswith("registers_per_thread 40 -> 48")
    assert len(list(compare_records.differences(PROFILE, of(launch=2)))) == 2


def test_compare_from_a_time_of_zero_has_no_percentage():
    (line,) = compare_records.differences(changed(forward_us=0.0), BENCH)
    assert line.endswith("forward_us 0 -> 100")


def test_compare_refuses_two_rows_of_one_key():
    twice = replace(BENCH, rows=[ROW, replace(ROW, forward_us=1.0)])
    with pytest.raises(Exception, match="one row of a key, got two of demo 1x2 packed"):
        list(compare_records.differences(BENCH, twice))


def test_compare_command_exit_status_says_what_it_found(tmp_path, capsys):
    paths = [str(tmp_path / f"{name}.json") for name in "abc"]
    for path, record in zip(paths, (BENCH, changed(both_us=150.0), SURVEY), strict=True):
        write(type(tmp_path)(path), record)
    assert compare_records.main([paths[0], paths[0]]) == 0
    assert compare_records.main([paths[0], paths[1]]) == 1
    assert "1 differences" in capsys.readouterr().out
    assert compare_records.main([paths[0], paths[2]]) == 2
    assert "must be of one kind" in capsys.readouterr().err
    assert compare_records.main([paths[0], str(tmp_path / "absent.json")]) == 2
    assert compare_records.main([paths[0]]) == 2
