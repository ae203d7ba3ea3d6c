# SPDX-License-Identifier: Apache-2.0
"""The table of claims says what records say: where, by whom, for which tensors."""

import pytest
from docs_pages import claims
from docs_pages.evidence import Evidence

from rlk.operator import Operator
from rlk.records import GateRow, GateSummary, Origin, Source, write

CORE, PACKAGES = "a" * 64, ("rlk-qwen3next", "rlk-qwenimage", "rlk-rope")
DIGESTS = {"rlk-core": CORE, **dict.fromkeys(PACKAGES, "b" * 64)}
ORIGIN = Origin(
    command="rlk",
    packages={n: Source(version="1", commit="c" * 40, dirty=False, digest=d)
              for n, d in DIGESTS.items()},
    device="GPU", driver=None, compute_capability="9.0", python="3", torch="2", triton=None,
    cuda=None,
)  # fmt: skip


def judged(operator: Operator, word, statuses):
    """A record of one word, by backend."""
    rows = [
        GateRow(operator=operator.name, bits_version=operator.bits_version, backend=backend,
                judgment=word, status=status, records=1)
        for backend, status in statuses.items()
    ]  # fmt: skip
    return GateSummary(origin=ORIGIN, tier="full", seed=1, passed=True, rows=rows)


def cell_of(operators, name, word, evidence):
    lines = claims.overview(operators, evidence).splitlines()
    places = [cell.strip() for cell in lines[0].split("|")]
    (line,) = (line for line in lines if line.startswith(f"| [{name}]"))
    return line.split("|")[places.index(f"`{word}`")].strip()


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ({"cuda": "passed", "triton": "passed"}, "sm_90"),
        ({"cuda": "passed"}, "sm_90 (cuda)"),
        (
            {"cuda": "passed", "triton": "failed"},
            "sm_90 (cuda), **failed: sm_90 (triton)**",
        ),
        ({"cuda": "failed", "triton": "failed"}, "**failed: sm_90**"),
        ({"cuda": "not_run"}, "not run"),
    ],
)
def test_cell_of_a_whole_claim_says_where_and_what_stands_out(
    operators, tmp_path, statuses, expected
):
    write(tmp_path / "gates.json", judged(operators["rms_norm"], "repeatable", statuses))
    evidence = Evidence(tmp_path, DIGESTS)
    assert cell_of(operators, "rms_norm", "repeatable", evidence) == expected


def test_cell_of_an_older_source_stands_out(operators, tmp_path):
    both = {"cuda": "passed", "triton": "passed"}
    write(tmp_path / "gates.json", judged(operators["rms_norm"], "repeatable", both))
    evidence = Evidence(tmp_path, {**DIGESTS, "rlk-core": "d" * 64})
    told = cell_of(operators, "rms_norm", "repeatable", evidence)
    assert told == "**passed, older source: sm_90**"


@pytest.mark.parametrize(
    ("name", "word", "expected"),
    [
        ("adaln_mod_projection", "order_free", "`dbias` on sm_90"),
        ("adaln_mod_projection", "gpu_to_gpu", "`act`, `dbias` on sm_90"),
        ("final_adaln_out", "gpu_to_gpu", "`act`, `mean`, `rstd`, `dbias` on sm_90"),
        (
            "adaln_mod_projection",
            "backend_equal",
            "`act`, `dbias` on sm_90; `mod`, `dtemb`, `dweight` on sm_90 among triton, cuda",
        ),
        # All that their word speaks of: nothing is left out.
        ("rms_norm", "order_free", "sm_90"),
        ("rms_norm_vllm", "rollout_equal", "sm_90"),
        ("rms_norm_vllm", "backend_equal", "sm_90"),
        ("multi_axis_rope", "order_free", "-"),
    ],
)
def test_cell_names_tensors_where_a_claim_leaves_some_out(
    operators, tmp_path, name, word, expected
):
    both = {"cuda": "passed", "triton": "passed"}
    write(tmp_path / "gates.json", judged(operators[name], word, both))
    assert cell_of(operators, name, word, Evidence(tmp_path, DIGESTS)) == expected


def test_records_below_the_table_are_linked_with_their_tier(operators, tmp_path):
    assert "Records: not run." in claims.overview(operators, Evidence(tmp_path, DIGESTS))
    both = {"cuda": "passed", "triton": "passed"}
    for name in ("rms_norm", "rms_norm_gated"):
        write(tmp_path / f"{name}.json", judged(operators[name], "repeatable", both))
    text = claims.overview(operators, Evidence(tmp_path, DIGESTS))
    links = [
        f"[sm_90](records/{name}.json) of {name}, tier full, at {'c' * 9}"
        for name in ("rms_norm", "rms_norm_gated")
    ]
    assert text.endswith(f"\nRecords: {'; '.join(links)}.\n")
