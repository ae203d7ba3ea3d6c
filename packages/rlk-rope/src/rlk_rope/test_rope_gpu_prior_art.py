# SPDX-License-Identifier: Apache-2.0
"""On a GPU, the default rounding has the bits of flash-attention's schedule without contraction.

And Liger, which the benchmark has beside it, computes the same function.
"""

from importlib.util import find_spec

import pytest
import torch

from rlk.bench.timing import peak_bytes
from rlk.test_support.on_gpu import BACKENDS, BF16, normal
from rlk_rope import multi_axis_rope_qk
from rlk_rope.multi_axis_rope_qk.prior_art import LIGER
from rlk_rope.test_rope_gpu_batches import assert_results, run, run_qk, tables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SEQUENCES = (128, 4096, 6032, 6889)
HEADS, COLUMNS = 24, 128


def query_and_key(seq, dtype):
    """Views of one packed projection."""
    query, key, _ = normal(1, seq, 3, HEADS, COLUMNS, dtype=dtype).unbind(2)
    return query, key


def reproduced(x, dy, cos, sin, interleaved, contraction):
    """(y, dx) of flash-attention's schedule."""
    from rlk_rope.multi_axis_rope.kernel_triton_prior_art import Rotary

    x = x.detach().requires_grad_()
    y = Rotary.apply(x, cos, sin, interleaved, contraction)
    return y.detach(), *torch.autograd.grad(y, x, dy)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("seq", SEQUENCES)
def test_packed_query_and_key_have_the_bits_of_the_schedule_without_contraction(
    seq, interleaved, backend
):
    q, k = query_and_key(seq, BF16)
    dq, dk = (normal(1, seq, HEADS, COLUMNS, seed=seed) for seed in (1, 2))
    cos, sin = tables(seq, COLUMNS // 2)
    options = {"interleaved": interleaved, "backend": backend}
    ones = [reproduced(x, dy, cos, sin, interleaved, False) for x, dy in ((q, dq), (k, dk))]
    for expected, x, dy in zip(ones, (q, k), (dq, dk), strict=True):
        assert_results(run(x, dy, cos, sin, **options), expected, "one tensor")
    expected = [t for pair in zip(*ones, strict=True) for t in pair]
    assert_results(run_qk(q, k, dq, dk, cos, sin, **options), expected, "query and key")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("columns", "turned"), [(128, 128), (256, 64), (256, 256), (48, 32)])
def test_other_widths_and_dtypes_have_the_bits_of_the_schedule_without_contraction(
    columns, turned, dtype, backend
):
    x, dy = (normal(1, 301, 5, columns, dtype=dtype, seed=seed) for seed in (0, 1))
    cos, sin = tables(301, turned // 2)
    options = {"rotary_dim": turned, "backend": backend}
    for interleaved in (True, False):
        expected = reproduced(x, dy, cos, sin, interleaved, False)
        found = run(x, dy, cos, sin, interleaved=interleaved, **options)
        assert_results(found, expected, f"interleaved={interleaved}")


def test_schedule_with_contraction_differs_in_last_bits_alone():
    x, dy = query_and_key(4096, torch.float32)
    cos, sin = tables(4096, COLUMNS // 2)
    fused, rounded = (reproduced(x, dy, cos, sin, True, on) for on in (True, False))
    for found, other in zip(fused, rounded, strict=True):
        share = (found != other).double().mean().item()
        assert 0.05 < share < 0.5


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="needs liger-kernel")
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize(("columns", "turned"), [(128, 128), (256, 64)])
def test_liger_computes_half_split_pairs_of_whole_and_partial_heads(columns, turned, dtype):
    # Integers: no product or sum is rounded, contracted or not.
    heads = (5, 2, 5, 2)
    q, k, dq, dk = (
        normal(2, 301, count, columns, dtype=dtype, seed=seed).mul(4).round()
        for seed, count in enumerate(heads)
    )
    cos, sin = (t.mul(4).round() for t in tables(2, 301, turned // 2))
    expected = run_qk(q, k, dq, dk, cos, sin, interleaved=False, rotary_dim=turned)
    # It writes over what it is given.
    leaves = [t.clone().requires_grad_() for t in (q, k)]
    outputs = LIGER.make({"interleaved": False})(*leaves, cos, sin)
    turned_back = torch.autograd.grad(outputs, leaves, [t.clone() for t in (dq, dk)])
    found = (*outputs, *turned_back)
    for name, actual, wanted in zip(("q", "k", "dq", "dk"), found, expected, strict=True):
        assert torch.equal(actual, wanted), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_query_and_key_are_turned_without_a_copy(backend):
    q, k = query_and_key(4096, BF16)
    cos, sin = tables(4096, COLUMNS // 2)
    peak, results = peak_bytes(lambda: multi_axis_rope_qk(q, k, cos, sin, backend=backend))
    assert peak == sum(t.untyped_storage().nbytes() for t in results)
