# SPDX-License-Identifier: Apache-2.0
"""A report from records alone: every number of theirs, every plot, and no other file."""

import os
import re
import xml.etree.ElementTree as ElementTree

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from rlk.cli import app
from rlk.records import (
    Bench,
    BenchRow,
    GateRow,
    GateSummary,
    Origin,
    Source,
    Survey,
    SurveyRow,
    TensorAccuracy,
    write,
)
from rlk.report import plots, tables
from rlk.report import sizes as sizes_of_records
from rlk.report.page import page

COMMIT, DIGEST = "a" * 40, "b" * 64
ORIGIN = Origin(
    command="rlk bench", device="Some GPU", driver="1", compute_capability="9.0", python="3.12",
    torch="2.13", triton=None, cuda="13",
    packages={"rlk-core": Source(version="1", commit=COMMIT, dirty=False, digest=DIGEST)},
)  # fmt: skip


def times(variant, rows, factor, **changes):
    values = {
        "operator": "demo", "size": f"{rows}x128", "layout": "contiguous", "dtype": "bfloat16",
        "variant": variant, "rows": rows, "forward_us": 3.25 * factor, "forward_ratio": factor,
        "both_us": 7.75 * factor, "both_ratio": factor,
    }  # fmt: skip
    return BenchRow(**{**values, **changes})


def sizes(rows):
    floor = {"forward_ratio": None, "both_ratio": None, "terabytes_per_second": {"forward": 4.125}}
    return [
        times("floor", rows, 1.0, **floor),
        times("cuda", rows, 1.125, ours=True),
        times("other", rows, 2.625, version="9.9"),
        times("absent", rows, 1.0, verdict="not applicable", reason="not installed", both_us=None,
              both_ratio=None, forward_us=None, forward_ratio=None),
    ]  # fmt: skip


def accuracy(histogram):
    return TensorAccuracy(
        dtype="bfloat16", elements=1000, beyond=17, correctly_rounded=0.875, worst_ulp=1.75,
        max_abs_error=0.5, ulp_histogram=histogram,
    )  # fmt: skip


BENCH = Bench(origin=ORIGIN, method="graphs", rows=[row for n in (1, 64, 1000) for row in sizes(n)])
SURVEY = Survey(
    origin=ORIGIN,
    seed=1,
    rows=[
        SurveyRow(
            operator="demo", size="131x128", dtype="bfloat16", variant=name, rows=131,
            rows_judged=64, rows_alone={"y": alone}, batches=7, batches_differing={"y": alone // 2},
            order_free={"dweight": not alone}, accuracy={"y": accuracy({"0": 900, "1": 100})},
        )
        for name, alone in (("golden", 0), ("other", 23))
    ],
)  # fmt: skip
GATES = GateSummary(
    origin=ORIGIN,
    tier="full",
    seed=1,
    passed=False,
    rows=[
        GateRow(operator="demo", bits_version=1, backend="cuda", judgment="layout", status=status,
                records=count)
        for status, count in (("passed", 41), ("failed", 3))
    ],
)  # fmt: skip


def test_page_of_records_shows_their_numbers_and_plots():
    made = page({"bench.json": BENCH, "survey.json": SURVEY, "gates.json": GATES})
    text = "\n".join(made.lines)
    for shown in (
        "| rlk bench | whole | Some GPU |",
        COMMIT,
        "3.65625",
        "2.625",
        "not applicable: not installed",
    ):
        assert shown in text
    assert "| demo | cuda | layout | sm_90 | 41 | 3 | 0 |" in text
    assert "y 23 of 64" in text
    assert "dweight by order" in text
    names = {"peers", "roofline", "rows", "differing", "ulp"}
    assert made.images.keys() == {f"demo-{name}.svg" for name in names}
    for svg in made.images.values():
        assert ElementTree.fromstring(svg).tag.endswith("svg")


def test_page_of_speed_alone_says_what_was_not_run():
    text = "\n".join(page({"bench.json": BENCH}).lines)
    assert "Accuracy and invariance of variants: not run." in text
    assert "Speed: not run." in "\n".join(page({"survey.json": SURVEY}).lines)


def test_files_of_a_report_need_no_other_file():
    made = page({"bench.json": BENCH, "survey.json": SURVEY})
    html = made.html()
    assert html.count("<svg") == len(made.images)
    assert not re.search(r"(?:src|href)=['\"](?!#)", re.sub(r"xlink:href", "", html))
    assert made.markdown().count("](data:image/svg+xml;base64,") == len(made.images)
    assert ".svg)" not in made.markdown()


def test_plots_with_log_axes_label_them_in_plain_numbers():
    drawn = page({"bench.json": BENCH, "survey.json": SURVEY}).images
    assert not [name for name, svg in drawn.items() if "mathdefault" in svg or "$" in svg]
    assert ">1000<" in drawn["demo-rows.svg"]
    assert ">0.1<" in drawn["demo-ulp.svg"]


def test_plot_of_differing_rows_leaves_out_sizes_where_none_does():
    equal = [replace(row, size="9x9", rows_alone={"y": 0}) for row in SURVEY.rows]
    assert plots.differing_rows(equal) is None
    drawn = plots.differing_rows([*SURVEY.rows, *equal])
    assert "131x128" in drawn
    assert "9x9" not in drawn
    made = page({"survey.json": replace(SURVEY, rows=[*SURVEY.rows, *equal])})
    told = "No variant has a row whose bits differ alone at 9x9 bfloat16: no panel."
    assert told in "\n".join(made.lines)
    assert told[:20] not in "\n".join(page({"survey.json": SURVEY}).lines)


def test_plot_of_ulp_is_of_the_size_with_most_elements():
    more = replace(accuracy({"0": 2000}), elements=2000)
    wide = [replace(row, size="131x256", accuracy={"y": more}) for row in SURVEY.rows]
    drawn = plots.ulp_histograms([*SURVEY.rows, *wide])
    assert "131x256" in drawn
    assert "131x128" not in drawn
    assert plots.ULP_LABEL in drawn
    told = "\n".join(page({"survey.json": replace(SURVEY, rows=[*SURVEY.rows, *wide])}).lines)
    assert "Ulp are drawn at 131x256, the size with most elements." in told


@pytest.mark.parametrize(
    ("share", "histogram", "told"),
    [
        (1.0, {"0": 1000}, "y 100 %"),
        (1.0, {"0": 993, "1": 4, "3-4": 3}, "y all but 7 of 1000"),
        (0.9999, {"0": 999, "1": 1}, "y 99.99 %"),
    ],
)
def test_share_correctly_rounded_hides_no_element(share, histogram, told):
    found = replace(accuracy(histogram), correctly_rounded=share)
    ((_, (cells,)),) = tables.values([replace(SURVEY.rows[0], accuracy={"y": found})])
    assert cells[tables.VALUES.index("correctly rounded")] == told


def test_names_of_columns_are_all_different():
    for columns in (tables.SPEED, tables.SUMMARY, tables.VALUES, tables.LIMITS):
        assert len({*columns}) == len(columns)


def test_times_stand_with_their_spread_under_the_fastest_other():
    rows = [replace(row, forward_spread_us=0.0613, backward_us=4.5) for row in sizes(64)]
    slower = times("slower", 64, 9.0)
    ((heading, cells),) = tables.speed([*rows, slower])
    assert heading == "64x128 bfloat16 contiguous; fastest other: other"
    (ours,) = (cell for cell in cells if cell[0] == "cuda")
    assert len(ours) == len(tables.SPEED)
    assert ours[tables.SPEED.index("forward us")] == "3.65625\u00a0±\u00a00.06"
    # No spread, no digits of one.
    assert ours[tables.SPEED.index("backward us")] == 4.5


def test_summary_is_one_line_for_each_size():
    lines = tables.summary(BENCH.rows, "cuda")
    assert [line[0] for line in lines] == ["1x128", "64x128", "1000x128"]
    assert tables.shared(BENCH.rows) == "bfloat16 contiguous"
    line = dict(zip(tables.SUMMARY, lines[1], strict=True))
    assert (line["forward us"], line["forward, x floor"]) == (3.65625, 1.125)
    assert (line["fastest other"], line["its both us"]) == ("other", 7.75 * 2.625)


def test_report_sums_up_each_of_our_backends():
    text = "\n".join(page({"bench.json": BENCH}).lines)
    summed, _, of_all = text.partition("**1x128 bfloat16 contiguous; ")
    assert "`cuda` beside the fastest other:" in summed
    assert "| 64x128 | 3.65625 | 1.125 |" in summed
    assert of_all


def test_summary_of_two_layouts_names_them():
    rows = [times("cuda", 64, 1.0, ours=True, layout=layout) for layout in ("packed", "contiguous")]
    named = ["64x128 bfloat16 packed", "64x128 bfloat16 contiguous"]
    assert [line[0] for line in tables.summary(rows, "cuda")] == named


def test_summary_of_a_backend_without_times_says_why():
    red = [
        times("cuda", 64, 1.0, ours=True, verdict="failed", reason="its gate is red", both_us=None)
    ]
    ((_, told, *rest),) = tables.summary(red, "cuda")
    assert told == "attempted and failed: its gate is red"
    assert {*rest} == {None}
    assert len(rest) == len(tables.SUMMARY) - 2


def test_variants_that_are_nowhere_here_are_one_sentence():
    rows, told = tables.absent(BENCH.rows)
    assert told == "Not run here: absent (not installed).\n"
    assert {row.variant for row in rows} == {"floor", "cuda", "other"}
    once = [replace(row, verdict="measured") if row.rows == 64 else row for row in BENCH.rows]
    assert tables.absent(once) == (once, None)


def test_plots_of_equal_records_are_equal_bytes():
    assert plots.against_peers(BENCH.rows) == plots.against_peers(BENCH.rows)
    assert plots.against_peers(BENCH.rows) != plots.against_peers(BENCH.rows[:4])


def test_plot_of_rows_needs_two_counts_of_one_size():
    assert plots.time_per_rows(sizes(64)) is None
    assert "Tx128" in plots.time_per_rows(BENCH.rows)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([("2048x2048", 2048), ("64x2048", 64)], ["Tx2048", "Tx2048"]),
        ([("1x128x24x128", 128), ("1x1x24x128", 1)], ["1xTx24x128", "1xTx24x128"]),
        (
            [("1x8x4x256 and 1x8x8x256 stream=8", 8), ("1x4x4x256 and 1x4x8x256 stream=8", 4)],
            ["1xTx4x256 and 1xTx8x256 stream=8"] * 2,
        ),
        ([("7x7x7", 7)], ["Tx7x7"]),
        ([], []),
    ],
)
def test_size_without_rows_opens_one_axis(measured, expected):
    rows = [times("cuda", count, 1.0, size=size) for size, count in measured]
    assert sizes_of_records.without_rows(rows) == expected


def test_page_tells_which_numbers_of_rows_were_not_measured():
    command = "rlk bench other --rows 7000; rlk bench demo --rows 1 --rows 5000"
    asked = replace(BENCH, origin=replace(ORIGIN, command=command))
    missing = "Tx128 bfloat16 contiguous: not measured at 5000 rows, "
    text = "\n".join(page({"bench.json": asked}).lines)
    assert f"{missing}its largest tensor would take more than 2 GB." in text
    cut = "\n".join(page({"bench.json": replace(asked, interrupted=True)}).lines)
    last = asked.rows[-1]
    assert f"after {last.size} {last.dtype} {last.layout}: the run was interrupted." in cut
    assert "not measured at" not in "\n".join(page({"bench.json": BENCH}).lines)


def test_plots_one_by_one_are_of_the_sizes_named():
    drawn = plots.of_times(BENCH.rows, sizes(64))
    assert "64x128" in drawn["peers"]
    assert "1000x128" not in drawn["peers"] + drawn["roofline"]
    assert drawn["rows"] == plots.time_per_rows(BENCH.rows)


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in ("report", *arguments)])


def test_command_writes_both_files_from_a_folder_of_records(tmp_path):
    write(tmp_path / "survey.json", SURVEY)
    (tmp_path / "other.json").write_text('{"schema": "another/1"}')
    result = run(tmp_path)
    assert result.exit_code == 0, result.output
    assert "y 23 of 64" in (tmp_path / "report.html").read_text()
    assert "y 23 of 64" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "must be a folder of records, got none"),
        ("{}", "must hold records of rlk gate, survey or bench, got none"),
        ('{"schema": "rlk.bench/2", "rows": 3}', "must be a record of rlk, got: "),
        ('{"schema": "rlk.gate-report/1"}', "must be a report of rlk gate, got: "),
        ('{"schema": ["rlk.bench/2"]}', "must hold records of rlk gate, survey or bench, got none"),
        # A run that was killed left nothing, or the beginning.
        ("", "a.json: must be JSON, got: Input data was truncated"),
        ('{"schema": "rlk.survey/1", "rows": [', "a.json: must be JSON, got: "),
        ("[" * 200_000, "a.json: must be JSON, got: maximum recursion depth exceeded"),
    ],
)
def test_command_without_a_record_exits_two_with_one_sentence(tmp_path, text, sentence):
    if text is not None:
        (tmp_path / "records").mkdir()
        (tmp_path / "records" / "a.json").write_text(text)
    result = run(tmp_path / "records")
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("kind", ["pipe", "dangling link"])
def test_command_a_record_that_is_no_file_exits_two(tmp_path, kind):
    path = tmp_path / "a.json"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere")
    result = run(tmp_path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"rlk: {path}: must be a file, got none, or a pipe or device\n"


def test_page_of_unlikely_names_shows_them_as_they_are():
    name = "<class 'x'> $x_{$"
    rows = [replace(row, variant=name) if row.variant == "other" else row for row in BENCH.rows]
    shown = page({"bench.json": replace(BENCH, rows=rows)}).html()
    assert "<class" not in shown
    assert "&lt;class 'x'&gt; $x_{$" in shown


def test_page_of_records_without_core_says_that_the_tree_is_not_known():
    made = page({"gates.json": replace(GATES, origin=replace(ORIGIN, packages={}))})
    assert "| 2.13 | - | changed since, or not known |" in "\n".join(made.lines)


@pytest.mark.parametrize("record", [BENCH, SURVEY, GATES], ids=["bench", "survey", "gates"])
def test_page_of_an_interrupted_run_says_so(record):
    made = page({"a.json": replace(record, interrupted=True)})
    assert "| a.json | rlk bench | interrupted |" in "\n".join(made.lines)


def test_page_of_two_machines_keeps_their_numbers_apart():
    other = replace(BENCH, origin=replace(ORIGIN, device="Another GPU"), rows=sizes(64))
    made = page({"a.json": BENCH, "b.json": other, "survey.json": SURVEY})
    _, first, second = "\n".join(made.lines).split("## demo on ")
    assert first.startswith("Some GPU\n")
    assert second.startswith("Another GPU\n")
    assert (first.count("| cuda |"), second.count("| cuda |")) == (3, 1)
    assert "y 23 of 64" in first
    assert "Accuracy and invariance of variants: not run." in second
    assert {"demo-0-peers.svg", "demo-1-peers.svg"} < made.images.keys()


def test_command_unwritable_output_exits_two(tmp_path):
    write(tmp_path / "survey.json", SURVEY)
    result = run(tmp_path, "--output", tmp_path / "survey.json")
    assert result.exit_code == 2
    assert "report: --output must be writable, got" in result.stderr
