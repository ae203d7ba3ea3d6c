# SPDX-License-Identifier: Apache-2.0
"""The example that trains in four layouts: norms agree, PyTorch's sums do not, faults are found."""

import json
from pathlib import Path

import pytest

import rlk
import rlk_qwen3next
from rlk.test_support.fresh_process import folders_of, status_and_output

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
FEW = ["--steps", "2", "--tokens", "6"]
# Each is run in front of the example, in the process whose copies the ranks are.
FAULTS = {
    "": "",
    "a rank keeps its sum out": """
def reduced(self, states):
    states = states * 0 if train_invariant.dist.get_rank() == 1 else states
    return original(self, states)

block = train_invariant.ExactGradAccumulator
original, block._reduced = block._reduced, reduced
""",
    "no exact sum": """
class Block(train_invariant.ExactGradAccumulator):
    def __enter__(self): pass
    def __exit__(self, *_): pass
    def report(self):
        report = super().report()
        names = report.exact + report.ordinary
        return type("Report", (), {"exact": report.exact, "ordinary": names})
train_invariant.ExactGradAccumulator = Block
""",
}


def run(fault, *arguments):
    """(exit status, what a process of its own prints)"""
    code = "import sys, train_invariant\n" + FAULTS[fault]
    code += "sys.exit(train_invariant.main(sys.argv[1:]))"
    folders = [EXAMPLES, *folders_of(rlk, rlk_qwen3next)]
    return status_and_output("-c", code, *arguments, folders=folders)


def test_example_exact_norms_agree_in_every_layout_and_rounded_ones_do_not(tmp_path):
    status, output = run("", *FEW, "--json", tmp_path / "found.json")
    assert status == 0, output
    found = json.loads((tmp_path / "found.json").read_text())
    layouts = {"2 x 4", "4 x 2", "8 x 1"}
    assert all(found[title].keys() == layouts for title in found if title != "elements")
    assert set(sum(found["covered trained, exact"].values(), [])) == {0}
    assert {counts[0] for counts in found["all trained, exact"].values()} == {0}
    for trained in ("covered", "all"):
        assert all(counts[0] > 0 for counts in found[f"{trained} trained, PyTorch"].values())
    assert output.rstrip().endswith("exact gradients: every bit the same")


@pytest.mark.parametrize("fault", [name for name in FAULTS if name])
def test_example_with_a_planted_fault_fails(fault):
    status, output = run(fault, "--steps", "1", "--tokens", "4")
    assert status == 1, output
    assert output.rstrip().endswith("exact gradients: differences")
