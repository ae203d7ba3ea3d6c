# SPDX-License-Identifier: Apache-2.0
"""Few and many tokens of a sample on a GPU, of any values: the bits of golden."""

import pytest
import torch

from rlk.compare import assert_same_bits
from rlk.test_support.on_gpu import BACKENDS, BF16, DEVICE
from rlk_qwenimage.test_layer_norm_gpu_batches import assert_results, random_batch, results

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

# (T, S, N): samples of one token and of a few; none; sizes at which blocks of a large device begin
# to share samples; rows that two passes serve.
SIZES = (
    (1, 1, 3072), (300, 1, 264), (300, 3, 264), (140, 3, 3072), (135, 2, 328), (7, 5, 37),
    (3, 0, 264), (2, 8, 3072), (2, 9, 3072), (20, 33, 264), (140, 41, 264), (9, 64, 520),
    (1, 301, 264), (3, 3, 5120),
)  # fmt: skip
KINDS = ("normal", "scales", "zeros", "specials")


def of_kind(tensor, kind, seed):
    """Rows of unlike scales, zeros of both signs, or NaN and infinities among them."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    chance = torch.rand(tensor.shape, generator=generator, device=DEVICE)
    out = tensor.clone()
    if kind == "scales":
        out[:, ::2] *= 2.0**30
        out[:, 1::3] *= 2.0**-30
    elif kind == "zeros":
        out[:, ::2] = 0.0
        out[chance < 0.2] = -0.0
    elif kind == "specials":
        out[chance < 0.002], out[chance > 0.998] = torch.nan, torch.inf
        out[(chance > 0.5) & (chance < 0.502)] = -torch.inf
    return out


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_samples_of_any_number_of_tokens_have_the_bits_of_golden(size, dtype):
    # All kinds in one process: Triton compiles once for them.
    for kind in KINDS:
        batch = random_batch(*size, dtype=dtype, seed=3)
        for name in ("x", "dout"):
            batch[name] = of_kind(batch[name], kind, len(name))
        expected = results({name: tensor.cpu() for name, tensor in batch.items()}, "golden")
        for backend in BACKENDS:
            found = results(batch, backend)
            for name, tensor in expected.items():
                # A NaN has the sign and payload of the processor that makes it.
                assert_same_bits(found[name].cpu(), tensor, f"{name} {backend} {kind}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_without_a_pause_equal_the_same_alone(backend):
    # The sums of a call are rounded by blocks that come up while those before them work.
    batches = [random_batch(1, 500, 3072, seed=seed) for seed in range(4)]
    alone = []
    for batch in batches:
        alone.append(results(batch, backend))
        torch.cuda.synchronize()
    together = [results(batch, backend) for _ in range(5) for batch in batches]
    for i, found in enumerate(together):
        assert_results(found, alone[i % len(batches)], f"call {i}")
