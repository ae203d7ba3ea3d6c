# SPDX-License-Identifier: Apache-2.0
"""What the benchmark compares with computes the operator: sizes, pairs, layouts."""

import pytest
import torch

from rlk.errors import BackendError
from rlk_rope import multi_axis_rope
from rlk_rope.conftest import NEEDS_INTERPRETER
from rlk_rope.multi_axis_rope import prior_art

# (S, H, D, rotary_dim): below, at and above a tile; pairs that are no power of two; a wide row.
SIZES = ((7, 1, 8, 8), (8, 2, 8, 8), (17, 3, 20, 12), (3, 3, 8, 2), (5, 3, 256, 256))
ROUNDED = [peer for peer in prior_art.PEERS if "reproduced" in peer.name]


def packed(x):
    """The second of three tensors side by side along the heads."""
    heads = x.shape[2]
    return torch.cat((x + 1, x, x - 1), 2)[:, :, heads : 2 * heads]


@NEEDS_INTERPRETER
@pytest.mark.parametrize("peer", ROUNDED, ids=lambda peer: peer.name)
@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, packed])
@pytest.mark.parametrize(("seq", "heads", "columns", "turned"), SIZES)
def test_reproduced_schedule_has_the_bits_of_golden_where_nothing_contracts(
    rope, dtype, interleaved, seq, heads, columns, turned, layout, peer
):
    shape = (1, seq, heads, columns)
    x, dy = (rope.normal(*shape, dtype=dtype, seed=seed) for seed in (0, 1))
    cos, sin = rope.tables(1, seq, turned // 2)
    options = {"interleaved": interleaved, "rotary_dim": turned}
    expected = rope.run(multi_axis_rope, x, dy, cos, sin, **options, backend="golden")
    function = peer.make({"interleaved": interleaved, "rounding": "separate"})
    rope.assert_same(rope.run(function, layout(x), dy, cos, sin), expected)


@NEEDS_INTERPRETER
def test_reproduced_schedule_turns_every_sample_by_the_shared_tables(rope):
    from rlk_rope.multi_axis_rope.kernel_triton_prior_art import Rotary

    x, dy = (rope.normal(2, 9, 3, 8, seed=seed) for seed in (0, 1))
    cos, sin = rope.tables(9, 4)
    expected = rope.run(multi_axis_rope, x, dy, cos, sin, backend="golden")
    rope.assert_same(rope.run(Rotary.apply, x, dy, cos, sin, True, False), expected)


def test_complex_numbers_differ_from_golden_by_contraction_alone(rope):
    (peer,) = (peer for peer in prior_art.PEERS if peer.name == "torch complex")
    function = peer.make({"interleaved": True})
    # Integers: no product or sum is rounded, contracted or not.
    x, dy, cos, sin = (
        rope.normal(*shape).mul(4).round()
        for shape in ((1, 5, 3, 8), (1, 5, 3, 8), (1, 5, 4), (1, 5, 4))
    )
    expected = rope.run(multi_axis_rope, x, dy, cos, sin, backend="golden")
    found = rope.run(function, x, dy, cos, sin)
    for name, actual, wanted in zip(("y", "dx"), found, expected, strict=True):
        assert torch.equal(actual, wanted), name


@pytest.mark.parametrize(("interleaved", "pairs"), [(False, 4), (True, 2)])
def test_complex_numbers_of_other_pairs_are_refused(rope, interleaved, pairs):
    function = prior_art.in_complex_numbers({"interleaved": interleaved})
    with pytest.raises(BackendError, match="adjacent pairs of whole heads"):
        function(rope.normal(1, 5, 3, 8), *rope.tables(1, 5, pairs))
