# SPDX-License-Identifier: Apache-2.0
"""The page on versions of kernels shows every row, and every limit that is missed."""

import json
import re

import bench_limits
import pytest
from docs_pages.versions import anchor

from rlk.errors import RlkError

PAGE = "reference/kernel-versions.md"
RECORD = "docs/records/h200/kernel-versions.json"
BENCH = "docs/records/h200/bench.json"
NUMBER = re.compile(r"\d+(?:\.\d+)?")


@pytest.fixture
def plant(repository):
    """Changes a record of the copy by a function of its JSON."""

    def changed(path, change):
        document = json.loads((repository / path).read_text())
        change(document)
        (repository / path).write_text(json.dumps(document))
        return document

    return changed


def tables(text):
    """The cells of the lines of versions, and of those of times, by kernel."""
    (part,) = re.findall(r"## Versions\n(.*?)\n## ", text, re.DOTALL)
    return {
        section.partition(" {")[0]: [lines(half) for half in section.partition("<details")[::2]]
        for section in part.split("\n### ")[1:]
    }


def lines(text):
    """The cells of the lines of a table."""
    found = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in found]


def told(us):
    """A time as a cell."""
    return "-" if us is None else f"{us:g}"


def test_page_shows_each_version_and_each_of_its_times(stage):
    site = stage()
    shown = tables(site.pages[PAGE])
    for record in site.evidence.versions.values():
        assert shown.keys() == record.serves.keys()
        for kernel, (versions, times) in shown.items():
            rows = [row for row in record.rows if row.kernel == kernel]
            assert [(line[0], line[1], line[4]) for line in versions] == [
                (str(row.version), row.change, f"{row.verdict}: {row.reason}") for row in rows
            ]
            assert sorted((line[0], line[1], line[3]) for line in times) == sorted(
                (f"{time.size} {time.dtype}", str(row.version), told(time.measured_us))
                for row in rows
                for time in row.times
            )


def test_version_stands_beside_the_time_that_was_predicted_of_it(stage, plant):
    def predict(document):
        row = document["rows"][0]
        first = {"size": "1x2", "dtype": "bfloat16", "measured_us": 7.0}
        other = {**first, "size": "3x4", "measured_us": 3.25}
        for version, predicted in ((1, {}), (2, {"predicted_us": [1.5, 2.5]})):
            times = {"times": [first, other | predicted], "change": f"planted {version}"}
            document["serves"]["planted"] = [row["operator"]]
            document["rows"].append({**row, **times, "kernel": "planted", "version": version})

    plant(RECORD, predict)
    versions, _ = tables(stage().pages[PAGE])["planted"]
    assert [line[1:4] for line in versions] == [
        ["planted 1", "-", "3.25 at 3x4"],
        ["planted 2", "1.5 to 2.5", "3.25 at 3x4"],
    ]


def test_every_number_of_versions_is_one_of_the_record(stage, repository):
    known = {float(number) for number in NUMBER.findall((repository / RECORD).read_text())}
    cells = [
        cell
        for pair in tables(stage().pages[PAGE]).values()
        for table in pair
        for line in table
        for cell in line[:5]  # behind them are commits
    ]
    numbers = [float(number) for cell in cells for number in NUMBER.findall(cell)]
    assert len(numbers) > 100
    assert set(numbers) - known == set()


def test_row_that_is_added_to_the_record_is_on_the_page(stage, plant):
    def add(document):
        row = {**document["rows"][-1], "version": 77, "change": "a planted change"}
        row |= {"verdict": "dropped", "times": [], "reason": "no time was taken", "commit": None}
        document["rows"].append(row)

    kernel = plant(RECORD, add)["rows"][-1]["kernel"]
    assert tables(stage().pages[PAGE])[kernel][0][-1] == [
        "77", "a planted change", "-", "-", "dropped: no time was taken", "-",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"verdict": "kept", "times": []}, "must have measured_us"),
        ({"version": 1}, "version must be above"),
    ],
)
def test_build_with_a_broken_row_stops(stage, plant, change, words):
    plant(RECORD, lambda document: document["rows"][-1].update(change))
    with pytest.raises(RlkError, match=words):
        stage()


def test_versions_name_operators_that_there_are(stage, operators):
    for record in stage().evidence.versions.values():
        assert {name for served in record.serves.values() for name in served} <= operators.keys()


def of_operator(text, operator):
    """The section of an operator's missed limits."""
    found = re.search(rf"\n### {operator} {{ #missed.*?(?=\n### |\Z)", text, re.DOTALL)
    return found and found[0]


def slow(document, operator, forward_us):
    """Gives each of our variants of an operator another time."""
    for row in document["rows"]:
        if row.get("ours") and row["operator"] == operator and "forward_us" in row:
            row["forward_us"] = forward_us


def test_page_lists_each_missed_limit_with_profile_and_attempts(stage, operators):
    site = stage()
    first = {
        name: next(b.name for b in operator.backends if b.name in bench_limits.OURS)
        for name, operator in operators.items()
    }
    record = site.evidence.records["h200/bench.json"]
    judged = bench_limits.verdicts(record, bench_limits.load(), first)
    missed = [verdict for verdict in judged if verdict.outcome == "missed"]
    text = site.pages[PAGE]
    assert len(re.findall(r"^- (?:aim|bound) ", text, re.MULTILINE)) == len(missed)
    for verdict in missed:
        section = of_operator(text, verdict.operator)
        assert f"\n- {verdict.text.removeprefix('missed').strip()}\n" in section
        attempts = section.partition("\nAttempts: ")[2]
        for versions in site.evidence.versions.values():
            for kernel, served in versions.serves.items():
                assert (f"](#{anchor(kernel)})" in attempts) == (verdict.operator in served)


def test_missed_limit_stands_beside_the_longest_launch_of_its_direction(stage, plant):
    def lengthen(document):
        rows = [r for r in document["rows"] if r["operator"] == "rms_norm_gated"]
        last = [r for r in rows if (r["backend"], r["direction"]) == ("cuda", "backward")][-1]
        last |= {"kernel": "planted", "duration_us": 9876.5, "dram_pct": 12.25}

    plant(BENCH, lambda document: slow(document, "rms_norm_gated", 1e6))
    plant("docs/records/h200/profile.json", lengthen)
    text = stage().pages[PAGE]
    assert "| backward | planted | 9876.5 | 12.25 |" in of_operator(text, "rms_norm_gated")
    assert "planted" not in of_operator(text, "multi_axis_rope")


def test_limit_is_listed_while_it_is_missed(stage, plant):
    plant(BENCH, lambda document: slow(document, "rms_norm_vllm", 1e6))
    assert ": forward <= 144 us: cuda 1e+06" in of_operator(stage().pages[PAGE], "rms_norm_vllm")
    plant(BENCH, lambda document: slow(document, "rms_norm_vllm", 0.5))
    assert of_operator(stage().pages[PAGE], "rms_norm_vllm") is None
