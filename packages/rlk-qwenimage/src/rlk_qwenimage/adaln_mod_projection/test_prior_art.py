# SPDX-License-Identifier: Apache-2.0
"""What the survey compares with computes the operator, where it can run."""

import pytest
import torch

from rlk import interpreter
from rlk.survey.values import places, survey
from rlk_qwenimage.adaln_mod_projection import prior_art
from rlk_qwenimage.adaln_mod_projection.operator import OPERATOR


@pytest.mark.skipif(
    not (torch.cuda.is_available() or interpreter.is_enabled()),
    reason="needs a GPU or Triton's interpreter",
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_in_one_tile_compute_the_operator_for_any_batch(dtype):
    from rlk_qwenimage.adaln_mod_projection.kernel_triton_prior_art import COLUMNS, DEPTH, ROWS

    name = f"fixed {ROWS}x{COLUMNS}x{DEPTH} tile, written here"
    row = survey(places(OPERATOR, dtype, 5, seed=1)[0], name)
    assert row.verdict == "measured", row.reason
    if torch.cuda.is_available():  # NumPy, which interprets tiles, has an order of its own
        assert row.rows_alone == row.batches_differing == {"mod": 0, "dtemb": 0}


def test_starved_library_without_its_environment_does_not_take_part(monkeypatch):
    monkeypatch.delenv(prior_art.WORKSPACE, raising=False)
    row = survey(places(OPERATOR, "float32", 5, seed=1)[0], "F.linear, cuBLAS without a workspace")
    assert row.verdict == "not applicable"
    assert "it needs CUBLAS_WORKSPACE_CONFIG=:0:0" in row.reason
    monkeypatch.setenv(prior_art.WORKSPACE, ":0:0")
    starved = prior_art.starved({})
    temb, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    plain = prior_art.in_torch({})
    assert torch.equal(starved(temb, weight, bias), plain(temb, weight, bias))
