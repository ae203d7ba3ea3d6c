# SPDX-License-Identifier: Apache-2.0
"""The example that trains in four layouts, with a block of Qwen-Image: exact gradients agree."""

import json
from pathlib import Path

import rlk
import rlk_qwenimage
from rlk.test_support.fresh_process import folders_of, status_and_output

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "train_invariant.py"


def test_example_exact_sums_agree_in_every_layout_and_rounded_ones_do_not(tmp_path):
    options = ["--model", "qwenimage", "--steps", "1", "--tokens", "6"]
    options += ["--json", tmp_path / "found.json"]
    folders = folders_of(rlk, rlk_qwenimage)
    status, output = status_and_output(EXAMPLE, *options, folders=folders)
    assert status == 0, output
    found = json.loads((tmp_path / "found.json").read_text())
    # Weights of norms 24 + 2 * 2 * 16, biases of modulations 2 * 288 + 96.
    assert found.pop("elements") == {"all": [760]}
    for title, layouts in found.items():
        assert layouts.keys() == {"2 x 4", "4 x 2", "8 x 1"}
        different = [counts[0] > 0 for counts in layouts.values()]
        assert different == [title.endswith("PyTorch")] * 3
