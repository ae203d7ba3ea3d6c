# SPDX-License-Identifier: Apache-2.0
"""layer_norm_modulate on a GPU reads inputs and gradients by their own strides and offsets."""

import pytest
import torch

from rlk.test_support.layouts import columns_first, narrow, narrow_misaligned, shifted, spread
from rlk.test_support.on_gpu import BACKENDS, DEVICE
from rlk_qwenimage import layer_norm_modulate
from rlk_qwenimage.test_layer_norm_gpu_batches import assert_results, random_batch, results

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SAMPLES, TOKENS = 3, 21
# A part of a chunk, two chunks, rows for blocks of 256, 384 and 1024 threads, and a longer one.
LENGTHS = (96, 129, 512, 2048, 3072, 4104, 8200)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Triton compiles for each layout and dtype: all dtypes in turn among the lengths that are multiples
# of 16, for which it compiles apart, and among the others.
CASES = [
    (n, dtype, backend)
    for backend in BACKENDS
    for i, n in enumerate(LENGTHS)
    for k, dtype in enumerate(DTYPES)
    if backend == "cuda" or k == i % len(DTYPES)
]


def tokens_first(t):
    """Samples and tokens in the other order in memory."""
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def odd_samples(t):
    """Aligned tokens of samples that begin at odd addresses."""
    per_sample = t[0].numel() + 1
    memory = torch.empty(len(t) * per_sample, dtype=t.dtype, device=t.device)
    strides = (per_sample, *t[0].contiguous().stride())
    return memory.as_strided(t.shape, strides).copy_(t)


LAYOUTS = (shifted, spread, narrow, narrow_misaligned, tokens_first, odd_samples, columns_first)
# Of one tensor alone: these change each of its strides, and which of two is larger.
ALONE = {"cuda": LAYOUTS, "triton": (spread, tokens_first)}


@pytest.mark.parametrize(("n", "dtype", "backend"), CASES, ids=str)
def test_results_of_every_layout_equal_those_of_contiguous_tensors(n, dtype, backend):
    batch = random_batch(SAMPLES, TOKENS, n, dtype=dtype, seed=n)
    expected = results(batch, backend)
    for layout in LAYOUTS:
        actual = results({name: layout(t) for name, t in batch.items()}, backend)
        assert_results(actual, expected, layout.__name__)
        assert all(t.is_contiguous() for t in actual.values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [128, 3072])
def test_results_with_one_tensor_in_another_layout_equal_those_of_none(n, backend):
    batch = random_batch(SAMPLES, TOKENS, n, seed=3)
    expected = results(batch, backend)
    for only in batch:
        for layout in ALONE[backend]:
            actual = results({**batch, only: layout(batch[only])}, backend)
            assert_results(actual, expected, f"{only} {layout.__name__}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [128, 3072])
def test_results_of_repeated_tensors_equal_those_of_their_copies(n, backend):
    batch = random_batch(SAMPLES, TOKENS, n, seed=4)
    repeated = [
        {**batch, "scale": batch["scale"][:1].expand(SAMPLES, n)},
        {**batch, "shift": batch["shift"][:, :1].expand(SAMPLES, n)},
        {**batch, "x": batch["x"][:1].expand(SAMPLES, TOKENS, n)},
        {**batch, "dout": batch["dout"][:, :1].expand(SAMPLES, TOKENS, n)},
        {
            **batch,
            "dout": torch.ones((), dtype=torch.bfloat16, device=DEVICE).expand_as(batch["x"]),
        },
    ]
    for given in repeated:
        expected = results({name: t.contiguous() for name, t in given.items()}, backend)
        assert_results(results(given, backend), expected, str([t.stride() for t in given.values()]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_modulation_of_a_packed_projection_equals_its_copies(backend):
    batch = random_batch(SAMPLES, TOKENS, 3072, seed=5)
    packed = torch.empty(SAMPLES, 6 * 3072, dtype=torch.bfloat16, device=DEVICE)
    views = {"shift": packed[:, :3072], "scale": packed[:, 3 * 3072 : 4 * 3072]}
    for name, view in views.items():
        view.copy_(batch[name])
    assert_results(results({**batch, **views}, backend), results(batch, backend), "packed")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [5, 96, 264, 2056, 3072, 8200])
def test_padding_of_a_row_with_infinite_rstd_counts_nowhere(n, backend):
    # Rows of equal values have no variance: with eps of 0 in FP32, rstd is infinite.
    batch = random_batch(2, 3, n, dtype=torch.float32, seed=6)
    batch["x"][1, 1] = 1.0
    inputs = [batch[name] for name in ("x", "scale", "shift")]
    leaves = [t.requires_grad_() for t in inputs]
    out = layer_norm_modulate(*leaves, 0.0, backend=backend)
    gradients = torch.autograd.grad(out, leaves, batch["dout"])
    expected = [t.detach().cpu().requires_grad_() for t in inputs]
    golden = layer_norm_modulate(*expected, 0.0, backend="golden")
    wanted = torch.autograd.grad(golden, expected, batch["dout"].cpu())
    for found, right in zip((out, *gradients), (golden, *wanted), strict=True):
        assert torch.equal(found.cpu().isnan(), right.isnan())
        keep = ~right.isnan()
        assert torch.equal(found.cpu()[keep], right[keep])
