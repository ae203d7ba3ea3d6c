# SPDX-License-Identifier: Apache-2.0
"""Norms on a GPU read inputs and gradients by their own strides and offsets."""

from dataclasses import replace

import pytest
import torch

from rlk.compare import assert_same_bits
from rlk.test_support.layouts import columns_first, narrow, narrow_misaligned, shifted, spread
from rlk.test_support.on_gpu import BACKENDS, assert_equal_bits
from rlk_qwen3next.conftest import EVERY_NORM, Norm
from rlk_qwen3next.test_norm_agreement import underflowing
from rlk_qwen3next.test_norm_gpu_batches import random_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ROWS = 37
# A part of a chunk, whole chunks, a row for a block of 1024 threads, and one longer than that.
LENGTHS = (96, 129, 256, 2048, 2056, 8200)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Triton compiles for each layout and dtype: each norm and each length has all dtypes in turn.
CASES = [
    (name, n, dtype, backend)
    for backend in BACKENDS
    for i, name in enumerate(EVERY_NORM)
    for j, n in enumerate(LENGTHS)
    for k, dtype in enumerate(DTYPES)
    if backend == "cuda" or k == (i + j) % len(DTYPES)
]

LAYOUTS = (shifted, spread, narrow, narrow_misaligned, columns_first)
# Of one tensor alone: these change each of its strides, and where a row begins.
ALONE = {"cuda": LAYOUTS, "triton": (spread, narrow_misaligned)}


def arranged(batch, layout, only=None):
    """The batch with every tensor, or one, in a layout."""

    def put(name, t):
        return layout(t) if only in (None, name) else t

    inputs = {name: put(name, t) for name, t in batch.inputs.items()}
    upstream = {name: put(f"d{name}", t) for name, t in batch.upstream.items()}
    return replace(batch, inputs=inputs, upstream=upstream)


def assert_results(actual, expected, what):
    for name, tensor in expected.items():
        assert_equal_bits(actual[name], tensor, f"{name} {what}")
        assert actual[name].is_contiguous()


@pytest.mark.parametrize(("name", "n", "dtype", "backend"), CASES, ids=str)
def test_results_of_every_layout_equal_those_of_contiguous_tensors(name, n, dtype, backend):
    norm = Norm(name)
    batch = random_batch(norm, ROWS, n, dtype=dtype, seed=n)
    expected = norm.results(batch, backend)
    for layout in LAYOUTS:
        actual = norm.results(arranged(batch, layout), backend)
        assert_results(actual, expected, layout.__name__)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [128, 2048])
def test_results_with_one_tensor_in_another_layout_equal_those_of_none(every_norm, n, backend):
    norm = every_norm
    batch = random_batch(norm, ROWS, n, seed=3)
    expected = norm.results(batch, backend)
    for only in (*batch.inputs, *(f"d{name}" for name in batch.upstream)):
        for layout in ALONE[backend]:
            actual = norm.results(arranged(batch, layout, only), backend)
            assert_results(actual, expected, f"{only} {layout.__name__}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [128, 2048])
def test_gradients_of_an_expanded_upstream_equal_those_of_its_copy(every_norm, n, backend):
    norm = every_norm
    batch = random_batch(norm, ROWS, n, seed=4)
    for expanded in (
        torch.ones((), dtype=torch.bfloat16, device="cuda").expand(ROWS, n),
        batch.upstream["y"][:1].expand(ROWS, n),
        batch.upstream["y"][:, :1].expand(ROWS, n),
    ):
        copied = dict.fromkeys(batch.upstream, expanded.contiguous())
        expected = norm.results(replace(batch, upstream=copied), backend)
        given = replace(batch, upstream=dict.fromkeys(batch.upstream, expanded))
        assert_results(norm.results(given, backend), expected, str(expanded.stride()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [5, 96, 264, 2056, 8200])
def test_padding_of_a_row_with_infinite_rstd_counts_nowhere(norm, n, backend):
    batch = underflowing(norm, n)
    expected = norm.results(batch, "golden")
    there = replace(
        batch,
        inputs={name: t.cuda() for name, t in batch.inputs.items()},
        upstream={"y": batch.upstream["y"].cuda()},
    )
    for layout in (torch.Tensor.contiguous, spread):
        for name, tensor in norm.results(arranged(there, layout), backend).items():
            assert_same_bits(tensor.cpu(), expected[name], f"{name} {layout.__name__}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_leading_axes_of_a_packed_view_equal_flat_rows(norm, backend):
    batch = random_batch(norm, 6 * ROWS, 128, seed=5)
    expected = norm.results(batch, backend)

    def packed(t):
        if t.dim() == 1:
            return t
        memory = torch.empty(6, ROWS, 3, 128, dtype=t.dtype, device=t.device)
        return memory[:, :, 1].copy_(t.view(6, ROWS, 128))

    dy = packed(batch.upstream["y"])
    run = norm.run({n: packed(t) for n, t in batch.inputs.items()}, dy, backend)
    for name in set(run) & set(expected):
        assert_equal_bits(run[name].reshape(expected[name].shape), expected[name], name)
