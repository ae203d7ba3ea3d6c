# SPDX-License-Identifier: Apache-2.0
"""Every backend against golden: recorded digests, and samples, tokens and columns off them."""

import pytest
import torch

from rlk.compare import assert_same_bits
from rlk.gates import golden_matrix
from rlk.gates.golden_matrix import Cell
from rlk.gates.inputs import VALUES, fixture
from rlk.test_support.on_gpu import BACKENDS, DEVICE
from rlk.test_support.recorded_digests import assert_recorded, recorded
from rlk_qwenimage.layer_norm_modulate.operator import OPERATOR
from rlk_qwenimage.test_layer_norm_gpu_batches import RESULTS, results

CELLS = golden_matrix.cells(OPERATOR)
# What a CPU computes again in seconds.
FEW_COLUMNS = 40
COLUMNS = (1, 3, 129, 256, 1000, 2048, 3072, 5120)
TOKENS = (1, 3, 33, 257)
SAMPLES = (1, 2, 7)
# Elements of a batch that golden computes in a second or two.
MOST_ELEMENTS = 1 << 21

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def identity(cell: Cell) -> str:
    return cell.key.replace("/", "-")


def test_recorded_digests_cover_every_result_of_every_cell():
    expected = {f"{cell.key}/default/{name}" for cell in CELLS for name in RESULTS}
    assert set(golden_matrix.load(OPERATOR)["digests"]) == expected


@pytest.mark.parametrize(
    "cell",
    [c for c in CELLS if c.sizes["N"] <= FEW_COLUMNS and c.sizes["S"] <= FEW_COLUMNS],
    ids=identity,
)
def test_recorded_digests_computed_again_are_the_same(cell):
    assert golden_matrix.golden_digests(cell) == recorded(cell)


class TestOnGpu:
    pytestmark = NEEDS_GPU

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("cell", CELLS, ids=identity)
    def test_backend_every_digest_of_the_matrix_is_golden(self, cell, backend):
        assert_recorded(cell, backend)

    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize("n", COLUMNS)
    def test_backends_samples_and_tokens_of_every_size_equal_golden(self, n, tokens):
        kinds = list(VALUES)
        for place, samples in enumerate(SAMPLES):
            if samples * tokens * n > MOST_ELEMENTS:
                continue
            # Another kind of data and dtype for each size: all of them occur with all lengths.
            kind = kinds[(place + tokens + n) % len(kinds)]
            dtype = OPERATOR.inputs[0].dtype[(place + tokens) % 3]
            sizes = {"S": tokens, "N": n}
            batch = fixture(OPERATOR, dtype, rows=samples, sizes=sizes, seed=n, values=VALUES[kind])
            given = {**batch.inputs, "dout": batch.upstream["out"]}
            expected = results(given, "golden")
            for backend in BACKENDS:
                actual = results({k: t.to(DEVICE) for k, t in given.items()}, backend)
                for name, tensor in expected.items():
                    what = f"{name} {backend} {kind} {dtype} {samples}x{tokens}x{n}"
                    assert_same_bits(actual[name].cpu(), tensor, what)
