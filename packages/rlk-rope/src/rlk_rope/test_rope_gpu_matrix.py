# SPDX-License-Identifier: Apache-2.0
"""Every backend against golden's recorded digests: dtype, sizes, pairs, roundings and data."""

import pytest
import torch

from rlk.gates import golden_matrix
from rlk.test_support.on_gpu import BACKENDS
from rlk.test_support.recorded_digests import assert_recorded, identity, recorded
from rlk_rope.multi_axis_rope.operator import OPERATOR as ONE
from rlk_rope.multi_axis_rope_qk.operator import OPERATOR as TWO

OPERATORS = (ONE, TWO)
CELLS = [cell for operator in OPERATORS for cell in golden_matrix.cells(operator)]
# What a CPU computes again in seconds.
FEW_COLUMNS = 24


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_recorded_digests_cover_both_pairings_and_roundings_of_every_cell(operator):
    names = [*(t.name for t in operator.outputs), *(f"d{t.name}" for t in operator.differentiable)]
    expected = {
        f"{cell.key}/interleaved={pairing},rounding={rounding}/{name}"
        for cell in golden_matrix.cells(operator)
        for pairing in (True, False)
        for rounding in ("separate", "complex_eager")
        for name in names
    }
    assert set(golden_matrix.load(operator)["digests"]) == expected


@pytest.mark.parametrize(
    "cell", [c for c in CELLS if c.sizes["D"] <= FEW_COLUMNS], ids=identity
)  # fmt: skip
def test_recorded_digests_computed_again_are_the_same(cell):
    assert golden_matrix.golden_digests(cell) == recorded(cell)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cell", CELLS, ids=identity)
def test_backend_every_digest_of_the_matrix_is_golden(cell, backend):
    assert_recorded(cell, backend)
