# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings on a GPU read tensors by their own strides and offsets, without a copy."""

import pytest
import torch

from rlk.bench.timing import peak_bytes
from rlk.launch import trace
from rlk.test_support.layouts import columns_first, narrow, shifted, spread
from rlk.test_support.on_gpu import BACKENDS, normal
from rlk_rope import multi_axis_rope, multi_axis_rope_qk
from rlk_rope.test_rope_gpu_batches import assert_results, run, run_qk, tables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

B, S = 2, 37
# (H, D, rotary_dim): words and a rest, heads beyond a thread's, a rest of an odd number of words,
# odd numbers, one head.
SIZES = ((24, 128, 128), (2, 256, 64), (5, 48, 32), (3, 40, 16), (3, 130, 130), (1, 24, 24))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Triton compiles for each layout and dtype: each size and each pairing has dtypes in turn.
CASES = [
    (*size, interleaved, dtype, backend)
    for backend in BACKENDS
    for i, size in enumerate(SIZES)
    for interleaved in (True, False)
    for k, dtype in enumerate(DTYPES)
    if backend == "cuda" or k == (i + interleaved) % len(DTYPES)
]


def packed(x):
    """One of query, key and value of a fused projection."""
    return x.new_empty(B, S, 3, *x.shape[2:])[:, :, 1].copy_(x)


def heads_first(x):
    """BSHD view of [B, H, S, D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


LAYOUTS = (packed, heads_first, spread, columns_first, shifted, narrow)


@pytest.mark.parametrize(
    ("heads", "columns", "turned", "interleaved", "dtype", "backend"), CASES, ids=str
)
def test_results_of_every_layout_equal_those_of_contiguous_tensors(
    heads, columns, turned, interleaved, dtype, backend
):
    x, dy = (normal(B, S, heads, columns, dtype=dtype, seed=seed) for seed in (0, 1))
    cos, sin = tables(B, S, turned // 2)
    options = {"interleaved": interleaved, "rotary_dim": turned, "backend": backend}
    expected = run(x, dy, cos, sin, **options)
    for layout in LAYOUTS:
        found = run(layout(x), layout(dy), cos, sin, **options)
        assert_results(found, expected, layout.__name__)
    spread_tables = (
        torch.stack((cos, sin), -1)[..., 0],
        torch.cat((sin, sin), -1)[..., : turned // 2],
    )
    for angles in (spread_tables, (shifted(cos), sin), (cos, shifted(sin))):
        assert_results(run(x, dy, *angles, **options), expected, "tables")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(1, S, 24, 128), (B, 1, 24, 128), (B, S, 1, 128), (1, 1, 1, 1)])
def test_results_of_repeated_tensors_equal_those_of_their_copies(sizes, backend):
    x, dy = (normal(*sizes, seed=seed).expand(B, S, 24, 128) for seed in (0, 1))
    cos, sin = tables(S, 64)
    copies = [t.contiguous() for t in (x, dy)]
    expected = run(*copies, cos, sin, backend=backend)
    assert_results(run(x, dy, cos, sin, backend=backend), expected, str(sizes))


@pytest.mark.parametrize("backend", BACKENDS)
def test_query_and_key_of_unlike_layouts_equal_two_calls(backend):
    q, k = normal(B, S, 16, 256), normal(B, S, 2, 256, seed=1)
    dq, dk = normal(B, S, 16, 256, seed=2), normal(B, S, 2, 256, seed=3)
    cos, sin = tables(S, 32)
    options = {"interleaved": False, "rotary_dim": 64, "backend": backend}
    ones = zip(run(q, dq, cos, sin, **options), run(k, dk, cos, sin, **options), strict=True)
    expected = [t for pair in ones for t in pair]
    for layout in LAYOUTS:
        for made in ((layout(q), k, layout(dq), dk), (q, layout(k), dq, layout(dk))):
            found = run_qk(*made, cos, sin, **options)
            assert_results(found, expected, layout.__name__)


def extra_bytes(function):
    """What a call allocates beyond its results."""
    peak, results = peak_bytes(function)
    return peak - sum(t.untyped_storage().nbytes() for t in results)


@pytest.mark.xdist_group("rope_memory")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", [packed, heads_first, spread, columns_first])
def test_call_on_a_view_allocates_its_results_and_nothing_else(layout, backend):
    x, dy = (layout(normal(B, S, 24, 128, seed=seed)) for seed in (0, 1))
    cos, sin = tables(S, 64)
    x.requires_grad_()

    def train():
        y = multi_axis_rope(x, cos, sin, backend=backend)
        return y.detach(), *torch.autograd.grad(y, x, dy)

    def both():
        return multi_axis_rope_qk(x.detach(), x.detach()[:, :, :2], cos, sin, backend=backend)

    assert (extra_bytes(train), extra_bytes(both)) == (0, 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("columns", [48, 45])
@pytest.mark.parametrize(
    ("dtype", "integer", "bits"),
    [(torch.bfloat16, torch.int16, 0x7F81), (torch.float32, torch.int32, 0x7F800123)],
)
def test_columns_that_are_copied_keep_the_bits_of_nan(dtype, integer, bits, columns, backend):
    x = normal(1, 5, 3, columns, dtype=dtype)
    x.view(integer)[..., 35] = bits
    y = multi_axis_rope(x, *tables(5, 16), rotary_dim=32, backend=backend)
    assert torch.equal(y.view(integer)[..., 32:], x.view(integer)[..., 32:])


@pytest.mark.parametrize("backend", ["golden", *BACKENDS])
@pytest.mark.parametrize("rounding", ["separate", "complex_eager"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_derivatives_of_every_layout_have_the_bits_of_golden_and_the_second_is_its_forward(
    dtype, interleaved, rounding, backend
):
    x, dy, ddx = (normal(B, S, 5, 80, dtype=dtype, seed=seed) for seed in range(3))
    # Pairs of another test: Triton compiles once for both.
    angles = tables(B, S, 32)
    options = {"interleaved": interleaved, "rotary_dim": 64, "rounding": rounding}
    on_cpu = [t.cpu() for t in (x, dy, ddx, *angles)]
    y, dx = run(*on_cpu[:2], *on_cpu[3:], **options, backend="golden")
    expected = y, dx, multi_axis_rope(*on_cpu[2:], **options, backend="golden")
    for layout in LAYOUTS:
        leaf, upstream = (layout(t).requires_grad_() for t in (x, dy))
        with trace() as launches:
            y = multi_axis_rope(leaf, *angles, **options, backend=backend)
            (dx,) = torch.autograd.grad(y, leaf, upstream, create_graph=True)
            (second,) = torch.autograd.grad(dx, upstream, layout(ddx))
        assert {launch.backend for launch in launches} == {backend}
        found = [t.detach().cpu() for t in (y, dx, second)]
        assert_results(found, expected, layout.__name__)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("interleaved", [True, False])
def test_second_derivatives_of_query_and_key_are_the_forward_of_golden(interleaved, backend):
    q, k = normal(B, S, 6, 80), normal(B, S, 2, 80, seed=1)
    given = [normal(*t.shape, seed=seed) for seed, t in enumerate((q, k, q, k), start=2)]
    angles = tables(S, 40)
    on_cpu = [t.cpu() for t in (*given[2:], *angles)]
    expected = multi_axis_rope_qk(*on_cpu, interleaved=interleaved, backend="golden")
    for layout in LAYOUTS:
        leaves = [layout(t).requires_grad_() for t in (q, k)]
        upstream = [layout(t).requires_grad_() for t in given[:2]]
        outputs = multi_axis_rope_qk(*leaves, *angles, interleaved=interleaved, backend=backend)
        first = torch.autograd.grad(outputs, leaves, upstream, create_graph=True)
        found = torch.autograd.grad(first, upstream, [layout(t) for t in given[2:]])
        assert_results([t.cpu() for t in found], expected, layout.__name__)
