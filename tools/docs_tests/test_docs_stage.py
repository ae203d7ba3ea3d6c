# SPDX-License-Identifier: Apache-2.0
"""What the site promises about itself, and the faults that stop its build."""

import json
import re
import subprocess
import sys

import docs_stage
import pytest
import write_readme
from docs_pages.errors import StageError
from docs_pages.evidence import Evidence
from docs_pages.measured import is_drawn
from docs_stage import ROOT
from msgspec.structs import replace

from rlk import environment
from rlk.records import BenchRow, Profile, ProfileRow, load_folder, write
from rlk.report.markdown import table

PAGE = "packages/rlk-qwen3next/src/rlk_qwen3next/rms_norm/page.md"
OF_NORM = "operators/rms_norm.md"
GATES = "docs/records/h200/gates.json"
# A figure of a measurement: it must come from a record, never from a hand.
FIGURE = re.compile(r"\d(?:\.\d+)? ?(?:us|µs|ms|TB/s|GB/s)\b|\d\.\d+ ?x\b|\d ?%")
MEASURED = re.compile(r"## Measured\n.*?(?=\n## )", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.])")


def append(path, text):
    path.write_text(f"{path.read_text()}\n{text}\n")


def test_site_of_the_repository_has_a_page_for_each_operator_and_manifest(stage, operators):
    pages = stage().pages
    assert {f"operators/{name}.md" for name in operators} <= pages.keys()
    assert {f"manifests/rlk-{p}.md" for p in ("qwen3next", "qwenimage", "rope")} <= pages.keys()
    for name in operators:
        text = pages[f"operators/{name}.md"]
        for heading in ("Claims and their records", "Dispatch", "Measured", "Reuse", "Limits"):
            assert f"\n## {heading}\n" in text
    assert "rlk gate" in pages["reference/cli.md"]
    assert "--tier" in pages["reference/cli.md"]


def test_support_matrix_cells_without_a_record_read_not_run(stage):
    lines = stage().pages["support.md"].splitlines()
    head = next(line for line in lines if line.startswith("| operator"))
    column = [cell.strip() for cell in head.split("|")].index("sm_120")
    rows = [line.split("|") for line in lines if line.startswith("| [")]
    assert rows
    assert {row[column].strip() for row in rows} == {"not run"}


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("docs/index.md", "<!-- rlk:claim -->", "mark must be one of"),
        ("docs/index.md", "<!-- rlk:claims", "must be finished"),
        (PAGE, "TODO: the other libraries", "must be finished, got 'TODO'"),
        (PAGE, "{{ figures }}", "must be finished"),
        ("docs/quickstart.md", "[see](concepts/nowhere.md)", "must lead to a file, got none"),
        (PAGE, "[see](../nothing.md)", "must lead to a file, got none"),
        (
            "docs/index.md",
            "<!-- rlk:proven rms_norm order_free cuda sm_100 -->",
            "rms_norm order_free cuda sm_100 must have a record that passed, got none",
        ),
        ("docs/index.md", "<!-- rlk:proven nothing order_free cuda sm_90 -->", "got none"),
        ("docs/index.md", "<!-- rlk:proven rms_norm rollout_equal cuda sm_90 -->", "got none"),
    ],
)
def test_build_of_a_page_with_a_fault_stops_and_names_it(repository, stage, file, text, words):
    append(repository / file, text)
    with pytest.raises(StageError, match=re.escape(words)):
        stage()


@pytest.mark.parametrize("heading", ["Limits", "Reuse", "Beside other libraries"])
def test_build_of_an_operator_without_a_section_stops(repository, stage, heading):
    path = repository / PAGE
    path.write_text(path.read_text().replace(f"## {heading}\n", f"## Not {heading}\n"))
    with pytest.raises(StageError, match=f"rms_norm: page.md must have a section {heading}"):
        stage()


def test_proven_claim_follows_its_record(repository, stage):
    append(repository / "docs/index.md", "<!-- rlk:proven rms_norm order_free cuda sm_90 -->")
    assert "NVIDIA H200](records/h200/gates.json)" in stage().pages["index.md"]
    document = json.loads((repository / GATES).read_text())
    for row in document["rows"]:
        if (row["operator"], row["judgment"]) == ("rms_norm", "order_free"):
            row["status"] = "failed"
    (repository / GATES).write_text(json.dumps(document))
    with pytest.raises(StageError, match="must have a record that passed, got failed"):
        stage()
    document["rows"] = [r for r in document["rows"] if r["judgment"] != "order_free"]
    (repository / GATES).write_text(json.dumps(document))
    with pytest.raises(StageError, match="must have a record that passed, got none"):
        stage()


def test_invariance_judged_forward_alone_is_not_shown_as_passed(repository, stage):
    document = json.loads((repository / GATES).read_text())
    document["rows"] = [r for r in document["rows"] if r["judgment"] != "gradient_invariance"]
    (repository / GATES).write_text(json.dumps(document))
    text = stage().pages["operators/rms_norm.md"]
    (line,) = (line for line in text.splitlines() if line.startswith("| `batch_invariant`"))
    assert "records/h200" not in line
    assert "not run" in line


def test_record_of_another_bits_version_is_not_shown(repository, stage):
    document = json.loads((repository / GATES).read_text())
    for row in document["rows"]:
        row["bits_version"] = 7
    (repository / GATES).write_text(json.dumps(document))
    assert "records/h200/gates.json" not in stage().pages["operators/rms_norm.md"]


def test_strict_build_refuses_an_anchor_that_is_not_there(repository, stage):
    append(repository / "docs/index.md", "[see](quickstart.md#nowhere)")
    docs_stage.write(repository, stage())
    command = [sys.executable, "-m", "mkdocs", "build", "-f", repository / "build/mkdocs.yml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "nowhere" in done.stderr


def test_page_of_records_says_the_tier_of_gates(repository, stage):
    document = json.loads((repository / GATES).read_text())
    (repository / GATES).write_text(json.dumps({**document, "tier": "planted"}))
    pages = stage().pages
    assert "(../records/h200/gates.json) | gates | planted | all |" in pages["reference/records.md"]
    assert "(../records/h200/gates.json), tier planted, " in pages["operators/rms_norm.md"]
    assert "(records/h200/gates.json), tier planted, " in pages["index.md"]


def test_operator_page_names_a_scalar_s_least_value(stage):
    assert re.search(r"^\| `eps` \| .* \| at least 0 \|$", stage().pages[OF_NORM], re.MULTILINE)


def test_operator_page_names_who_was_nowhere_judged_in_a_sentence(stage):
    text = stage().pages[OF_NORM]
    (head,) = (line for line in text.splitlines() if line.startswith("| claim |"))
    assert "triton, sm_90" in head
    assert "triton, cpu" not in head
    assert "No record speaks for triton on cpu, golden on sm_90: not run." in text


def test_records_that_are_kept_are_of_no_changed_tree(stage):
    records = stage().evidence.records
    assert records
    for path, record in records.items():
        assert not any(source.dirty for source in record.origin.packages.values()), path


def untraced(text, records):
    """Numbers of a page's measured part that no record holds."""
    (part,) = MEASURED.findall(text)
    known = {float(n) for n in NUMBER.findall(records)}
    # Record paths and versions are words; fractions of one are shown in per cent.
    known |= {float(f"{100 * n:g}") for n in known}
    # Of a spread, one digit; of a histogram, the elements that are not correctly rounded.
    known |= {float(f"{float(n):.1g}") for n in re.findall(r'_spread_us": ?([\d.e-]+)', records)}
    for bins in re.findall(r'"ulp_histogram": ?(\{[^}]*\})', records):
        known.add(sum(count for label, count in json.loads(bins).items() if label != "0"))
    rows = [line for line in part.splitlines() if line.startswith("|")]
    cells = [cell for row in rows for cell in row.split("|")]
    return [n for cell in cells for n in NUMBER.findall(cell) if float(n) not in known]


def test_every_number_of_an_operator_page_traces_to_a_record(stage, operators):
    site = stage()
    measured = 0
    for name in operators:
        text = site.pages[f"operators/{name}.md"]
        records = "".join(
            (ROOT / "docs" / "records" / path).read_text()
            for path in site.evidence.records
            if f"](../records/{path})" in text
        )
        assert untraced(text, records) == [], name
        measured += len(NUMBER.findall(MEASURED.findall(text)[0]))
    assert measured > 100
    planted = table(("variant", "forward us"), [("cuda", 123.4567)])
    assert untraced(f"## Measured\n{planted}\n## Limits\n", records) == ["123.457"]
    few = '{"forward_spread_us": 0.1131, "ulp_histogram": {"0": 90, "1": 4, "3-4": 3}}'
    planted = table(("forward us", "rounded"), [("90 ± 0.2", "all but 8"), ("± 0.1", "all but 7")])
    assert untraced(f"## Measured\n{planted}\n## Limits\n", few) == ["0.2", "8"]


def summarised(text):
    """The lines of the first table of a page's measured part."""
    (part,) = MEASURED.findall(text)
    lines = part.partition("| size |")[2].splitlines()[2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[: lines.index("")]]


def test_operator_page_shows_a_summary_first_and_the_rest_folded(stage):
    site = stage()
    record = site.evidence.records["h200/bench.json"]
    rows = [r for r in record.rows if r.operator == "rms_norm" and r.variant == "cuda"]
    text = site.pages[OF_NORM]
    found = summarised(text)
    assert [line[0] for line in found] == [row.size for row in rows]
    assert [line[3] for line in found] == [f"{row.both_us:g}" for row in rows]
    assert [line[8] for line in found] == [f"{row.peer_ratio:g}" for row in rows]
    (part,) = MEASURED.findall(text)
    shown = re.sub(r"<details.*?</details>", "", part, flags=re.DOTALL)
    assert "\n| torch.compile |" in part.partition("### Accuracy")[0]
    assert "\n| torch.compile |" not in shown.partition("### Accuracy")[0]
    assert "Not run here: FlashInfer (" in shown
    assert "| FlashInfer |" not in part.partition("### Accuracy")[0]
    assert "(../guides/benchmark.md#columns)" in shown


def test_survey_of_a_cpu_is_folded_behind_that_of_a_gpu(repository, stage):
    shown = re.sub(r"<details.*?</details>", "", stage().pages[OF_NORM], flags=re.DOTALL)
    assert re.findall(r"\*\*(\S+) bfloat16\*\*", shown) == ["257x2048"]
    (repository / "docs/records/h200/survey.json").unlink()
    alone = re.sub(r"<details.*?</details>", "", stage().pages[OF_NORM], flags=re.DOTALL)
    assert "**33x2048 bfloat16**" in alone


def test_matrix_products_are_not_drawn_beside_those_in_another_dtype(operators):
    compiled = BenchRow(
        operator="", size="8x16", layout="contiguous", dtype="bfloat16", variant="torch.compile"
    )
    drawn = {name for name, operator in operators.items() if is_drawn(operator, compiled)}
    assert operators.keys() - drawn == {"adaln_mod_projection", "final_adaln_out"}
    ours = replace(compiled, variant="cuda")
    assert is_drawn(operators["adaln_mod_projection"], ours)


def test_operator_page_shows_what_limits_kernels_once_there_is_a_record(repository, stage):
    heading = "### What limits the kernels"
    title = re.compile(rf"^{heading}$", re.MULTILINE)
    folder = repository / "docs" / "records" / "h200"
    (folder / "profile.json").unlink(missing_ok=True)
    assert not any(title.search(text) for text in stage().pages.values())
    row = ProfileRow(
        operator="rms_norm", size="8x16", layout="contiguous", dtype="bfloat16", backend="cuda",
        direction="backward", launch=1, kernel="row_kernel", grid="7x1x1", block="128x1x1",
        duration_us=871.3, dram_pct=83.19, stall="barrier", stalled_warps_per_issue=3.072,
        registers_per_thread=41,
    )  # fmt: skip
    origin = next(iter(load_folder(folder).values())).origin
    record = Profile(origin=origin, ncu="2025.3.1.0", method="a way", rows=[row])
    write(folder / "profile.json", record)
    pages = stage().pages
    assert not title.search(pages["operators/rms_norm_gated.md"])
    (part,) = MEASURED.findall(pages["operators/rms_norm.md"])
    shown = part.partition(heading)[2]
    assert "[Record](../records/h200/profile.json)" in shown
    assert "Nsight Compute 2025.3.1.0: a way." in shown
    (line,) = (line for line in shown.splitlines() if line.startswith("| cuda"))
    assert line.startswith(
        "| cuda | backward | row_kernel | 871.3 | 83.19 | - | - | - | - | barrier"
    )
    assert untraced(f"## Measured\n{shown}\n## ", (folder / "profile.json").read_text()) == []
    assert (
        "[h200/profile.json](../records/h200/profile.json) | what limits kernels | -"
        in (pages["reference/records.md"])
    )


def test_readme_takes_its_claims_and_its_plot_from_records(operators):
    evidence = Evidence(ROOT / "docs" / "records", environment.digests())
    readme = (ROOT / "README.md").read_text()
    text, images = write_readme.written(readme, operators, evidence)
    assert text == readme, "hatch run docs:readme"
    assert len(images) == 1
    for name, svg in images.items():
        assert (ROOT / name).read_text() == svg, "hatch run docs:readme"
    for planted in (
        readme.replace("`dbias` on cpu", "`mod` on cpu", 1),
        readme.replace("tier short", "tier full", 1),
        re.sub(r"(, at )[0-9a-f]{9}", r"\g<1>000000000", readme, count=1),
    ):
        assert planted != readme
        assert write_readme.written(planted, operators, evidence)[0] == readme
    others = FIGURE.findall(readme.partition("<!-- rlk:begin claims -->")[0])
    assert others == []


def test_readme_names_the_record_of_its_plot_and_no_commit_changes_that(operators):
    text = "<!-- rlk:begin plot rms_norm -->\n<!-- rlk:end plot -->\n"
    folder = ROOT / "docs" / "records"
    of_record = load_folder(folder)["h200/bench.json"].origin.packages
    same = {name: source.digest for name, source in of_record.items()}
    told, images = write_readme.written(text, operators, Evidence(folder, same))
    assert images.keys() == {"docs/rms_norm-peers.svg"}
    assert "](docs/records/h200/bench.json): NVIDIA H200, torch " in told
    assert ". Ours, in green: `cuda`, `triton`.\n" in told
    changed = Evidence(folder, {**same, "rlk-qwen3next": "0" * 64})
    assert write_readme.written(text, operators, changed)[0] == told


@pytest.mark.parametrize("part", ["figures", "plot nobody"])
def test_readme_part_without_a_source_is_refused(operators, part):
    text = f"<!-- rlk:begin {part} -->\n<!-- rlk:end {part.split()[0]} -->\n"
    with pytest.raises(StageError, match="must be claims or plot OPERATOR"):
        write_readme.written(text, operators, Evidence(ROOT / "docs" / "records", {}))


def test_pages_written_by_hand_hold_no_figure_of_a_measurement():
    paths = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/src/*/*/page.md")]
    paths += [*ROOT.glob("packages/*/README.md"), ROOT / "README.md"]
    found = {
        f"{path.relative_to(ROOT)}: {line}"
        for path in paths
        for line in path.read_text().splitlines()
        if FIGURE.search(line)
    }
    assert found == set()
    assert FIGURE.search("173 us on an H200")
    assert FIGURE.search("1.22x, 1.30x")
    assert FIGURE.search("differ in 17 % of all elements")
