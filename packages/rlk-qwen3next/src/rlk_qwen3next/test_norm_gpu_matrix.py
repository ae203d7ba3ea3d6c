# SPDX-License-Identifier: Apache-2.0
"""Every backend against golden's recorded digests: dtype, row length, rows, data and scalars."""

import pytest
import torch

from rlk.gates import golden_matrix
from rlk.test_support.on_gpu import BACKENDS
from rlk.test_support.recorded_digests import assert_recorded, identity, recorded
from rlk_qwen3next.qwen3_next_rms_norm.operator import OPERATOR as ZERO_CENTRED
from rlk_qwen3next.rms_norm.operator import OPERATOR as RMS_NORM
from rlk_qwen3next.rms_norm_gated.operator import OPERATOR as RMS_NORM_GATED
from rlk_qwen3next.rms_norm_residual.operator import OPERATOR as RMS_NORM_RESIDUAL

OPERATORS = (RMS_NORM_GATED, RMS_NORM_RESIDUAL, RMS_NORM, ZERO_CENTRED)
CELLS = [cell for operator in OPERATORS for cell in golden_matrix.cells(operator)]
# What a CPU computes again in seconds: a lane, and a chunk with one column more than its half.
AGAIN = (3, 129)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_recorded_digests_cover_the_matrix(operator):
    names = {t.name for t in operator.outputs + operator.saved}
    names |= {f"d{t.name}" for t in operator.returned_gradients}
    names |= {f"d{t.name}_state" for t in operator.parameters}
    expected = {
        f"{cell.key}/{variant}/{name}"
        for cell in golden_matrix.cells(operator)
        for variant in golden_matrix.variants(operator)
        for name in names
    }
    assert set(golden_matrix.load(operator)["digests"]) == expected


@pytest.mark.parametrize("cell", [c for c in CELLS if c.sizes["N"] in AGAIN], ids=identity)
def test_recorded_digests_computed_again_are_the_same(cell):
    assert golden_matrix.golden_digests(cell) == recorded(cell)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cell", CELLS, ids=identity)
def test_backend_every_digest_of_the_matrix_is_golden(cell, backend):
    assert_recorded(cell, backend)
