# SPDX-License-Identifier: Apache-2.0
"""What the guide says of rollout engines follows the records."""

import pytest
from docs_pages import rollout
from docs_pages.evidence import Evidence

from rlk.records import ConventionRow, Conventions, GateRow, GateSummary, Origin, Source, write

NORM = "rms_norm_vllm"
DIGESTS = {"rlk-core": "a" * 64, "rlk-qwen3next": "b" * 64}
PACKAGES = {
    name: Source(version="1", commit="c" * 40, dirty=False, digest=digest)
    for name, digest in DIGESTS.items()
}
ORIGIN = Origin(
    command="rlk", packages=PACKAGES, device="GPU", driver=None, compute_capability="9.0",
    python="3", torch="2", triton=None, cuda=None,
)  # fmt: skip


def line_of(text, start):
    (line,) = (line for line in text.splitlines() if line.startswith(start))
    return line


@pytest.mark.parametrize("status", ["passed", "failed", "not_run"])
def test_engine_bits_read_as_their_record_says(operators, tmp_path, status):
    start = f"| [{NORM}](../operators/{NORM}.md) | cuda |"
    text = rollout.engines(operators, Evidence(tmp_path, DIGESTS))
    assert line_of(text, start).endswith("| not run |")
    row = GateRow(
        operator=NORM, bits_version=operators[NORM].bits_version, backend="cuda",
        judgment="rollout_equal", status=status, records=35,
    )  # fmt: skip
    summary = GateSummary(origin=ORIGIN, tier="full", seed=1, passed=True, rows=[row])
    write(tmp_path / "gates.json", summary)
    told = f"[{status}](../records/gates.json) on sm_90"
    text = rollout.engines(operators, Evidence(tmp_path, DIGESTS))
    assert line_of(text, start).endswith(f"| {'not run' if status == 'not_run' else told} |")
    assert line_of(text, start.replace("cuda", "triton")).endswith("| not run |")
    assert "| [rms_norm]" not in text


def test_counts_of_a_record_stand_by_the_rounding_they_are_of(operators, tmp_path):
    assert rollout.conventions(operators, Evidence(tmp_path, DIGESTS)) == "not run\n"
    base = {"operator": NORM, "size": "2 rows of N=4", "dtype": "bfloat16"}
    rows = [
        ConventionRow(
            **base, rounding="ieee", other="theirs", version="7", ppm=4.25, seeds=3, of=40
        ),
        ConventionRow(**base, rounding="vllm", other="theirs", version="7", missing="no GPU"),
        ConventionRow(**base, rounding="ieee", other="absent", missing="not installed"),
    ]
    write(tmp_path / "counts.json", Conventions(origin=ORIGIN, method="bits", rows=rows))
    text = rollout.conventions(operators, Evidence(tmp_path, DIGESTS))
    assert "**[GPU, torch 2](../records/counts.json)**" in text
    assert "| operator | size | other | `ieee` | `vllm` |" in text
    assert f"| {NORM} | 2 rows of N=4 | theirs (7) | 4.25 ppm, 3 of 40 | not run |" in text
    assert f"| {NORM} | 2 rows of N=4 | absent | not run | - |" in text
    other = {**DIGESTS, "rlk-qwen3next": "d" * 64}
    assert "torch 2, older source]" in rollout.conventions(operators, Evidence(tmp_path, other))
