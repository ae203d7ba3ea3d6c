# SPDX-License-Identifier: Apache-2.0
"""What is special to one tensor: pairs, rest of the columns, both roundings, argument errors."""

from fractions import Fraction

import pytest
import torch

from rlk.compare import assert_same_bits
from rlk.errors import ArgumentError
from rlk_rope import multi_axis_rope

# FP32 holds 24 bits of a significand, above 2^-149.
BITS, LEAST = 24, -149


def rounded(value: Fraction) -> float:
    """To nearest FP32, ties to even, of a normal or subnormal result."""
    if value == 0:
        return 0.0
    exponent = abs(value).numerator.bit_length() - abs(value).denominator.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - BITS + 1, LEAST)
    return float(round(value / unit) * unit)


def by_fractions(pair, c, s, rounding, inverse):
    """One pair turned by exact arithmetic, rounded where it is written."""
    a, b, c, s = (Fraction(float(v)) for v in (*pair, c, s))
    s = -s if inverse else s
    second = [Fraction(rounded(b * s)), Fraction(rounded(b * c))]
    first = [a * c, a * s]
    if rounding == "separate":
        first = [Fraction(rounded(v)) for v in first]
    return rounded(first[0] - second[0]), rounded(first[1] + second[1])


def test_quarter_turn_by_hand_moves_columns_and_flips_signs(backend, interleaved):
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    cos, sin = torch.zeros(1, 2), torch.ones(1, 2)
    y = multi_axis_rope(x, cos, sin, interleaved=interleaved, backend=backend)
    expected = [-2.0, 1.0, -4.0, 3.0] if interleaved else [-3.0, -4.0, 1.0, 2.0]
    assert y.flatten().tolist() == expected


def test_every_rounding_step_is_that_of_exact_arithmetic(rope, backend, rounding):
    x, dy = rope.normal(1, 5, 3, 8), rope.normal(1, 5, 3, 8, seed=1)
    # Half of them as far apart as a cancellation needs to show its rounding.
    x[..., 4:] *= 1e-3
    cos, sin = rope.tables(5, 4)
    results = rope.run(multi_axis_rope, x, dy, cos, sin, rounding=rounding, backend=backend)
    for given, found, inverse in zip((x, dy), results, (False, True), strict=True):
        expected = [
            by_fractions(pair, cos[t, p], sin[t, p], rounding, inverse)
            for t, token in enumerate(given[0])
            for head in token
            for p, pair in enumerate(head.view(4, 2))
        ]
        assert_same_bits(found, torch.tensor(expected).view(1, 5, 3, 8), "result")


def test_roundings_differ_where_they_may_and_only_in_last_bits(rope, backend):
    x, (cos, sin) = rope.normal(1, 64, 4, 16), rope.tables(64, 8)
    y, eager = (
        multi_axis_rope(x, cos, sin, rounding=r, backend=backend)
        for r in ("separate", "complex_eager")
    )
    share = (y != eager).double().mean().item()
    # A fourth of the elements of a product of complex numbers.
    assert 0.15 < share < 0.4


def test_split_pairs_equal_adjacent_pairs_of_columns_in_another_order(
    rope, backend, dtype, rounding
):
    x, (cos, sin) = rope.normal(2, 5, 3, 12, dtype=dtype), rope.tables(5, 6)
    dy = rope.normal(2, 5, 3, 12, dtype=dtype, seed=1)
    order = torch.arange(12).view(2, 6).t().flatten()
    options = {"rounding": rounding, "backend": backend}
    split = rope.run(multi_axis_rope, x, dy, cos, sin, interleaved=False, **options)
    adjacent = rope.run(multi_axis_rope, x[..., order], dy[..., order], cos, sin, **options)
    for a, b in zip(split, adjacent, strict=True):
        assert_same_bits(a[..., order], b, "columns")


def test_partial_rotation_turns_the_first_columns_and_copies_the_bits_of_others(
    rope, backend, dtype, interleaved, rounding
):
    x, (cos, sin) = rope.normal(2, 5, 3, 20, dtype=dtype), rope.tables(5, 4)
    integer = torch.int32 if dtype == "float32" else torch.int16
    # A signalling NaN with a payload: no arithmetic leaves it as it is.
    x.view(integer)[..., 11] = 0x7F800123 if dtype == "float32" else 0x7F81
    if dtype == "float16":
        x.view(integer)[..., 11] = 0x7C41
    options = {"interleaved": interleaved, "rounding": rounding, "backend": backend}
    for y in rope.run(multi_axis_rope, x, x, cos, sin, rotary_dim=8, **options):
        assert torch.equal(y.view(integer)[..., 8:], x.view(integer)[..., 8:])
    whole = rope.run(multi_axis_rope, x[..., :8], x[..., :8], cos, sin, **options)
    partial = rope.run(multi_axis_rope, x, x, cos, sin, rotary_dim=8, **options)
    for a, b in zip(partial, whole, strict=True):
        assert_same_bits(a[..., :8], b, "turned columns")


def test_gradient_of_a_rotation_undoes_it(rope, backend, interleaved):
    # A rotation by multiples of a quarter turn is exact in any order.
    x = rope.normal(2, 4, 3, 8)
    cos, sin = torch.tensor([1.0, 0.0, -1.0, 0.0]), torch.tensor([0.0, 1.0, 0.0, -1.0])
    tables = [t[:, None].expand(4, 4) for t in (cos, sin)]
    y, _ = rope.run(multi_axis_rope, x, x, *tables, interleaved=interleaved, backend=backend)
    _, back = rope.run(multi_axis_rope, x, y, *tables, interleaved=interleaved, backend=backend)
    assert torch.equal(back, x)


X, TABLE = torch.zeros(2, 5, 3, 8), torch.zeros(5, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cos": torch.zeros(5, 3)}, "cos must be [5, 4] or [2, 5, 4], got [5, 3]"),
        ({"sin": torch.zeros(4, 4)}, "sin must be [5, 4] or [2, 5, 4], got [4, 4]"),
        ({"cos": torch.zeros(1, 5, 4)}, "cos must be [5, 4] or [2, 5, 4], got [1, 5, 4]"),
        ({"cos": torch.zeros(5, 8)}, "cos must be [5, 4] or [2, 5, 4], got [5, 8]"),
        ({"rotary_dim": 4}, "cos must be [5, 2] or [2, 5, 2], got [5, 4]"),
        ({"rotary_dim": 7}, "rotary_dim must be an even number from 2 to D=8, got 7"),
        ({"rotary_dim": 10}, "rotary_dim must be an even number from 2 to D=8, got 10"),
        ({"rotary_dim": 0}, "rotary_dim must be an even number from 2 to D=8, got 0"),
        ({"rotary_dim": 4.0}, "rotary_dim must be an even number from 2 to D=8, got 4.0"),
        ({"x": X[..., :7]}, "x must be [..., H, D] with an even D, got D=7; set rotary_dim"),
        ({"x": X.double()}, "x must be float32 or bfloat16 or float16, got float64"),
        ({"x": X.long()}, "x must be float32 or bfloat16 or float16, got int64"),
        ({"cos": TABLE.bfloat16()}, "cos must be float32, got bfloat16"),
        ({"sin": TABLE.double()}, "sin must be float32, got float64"),
        ({"cos": TABLE.clone().requires_grad_()},
         "cos must be without gradient, got requires_grad=True; detach it"),
        ({"sin": TABLE.to("meta")}, "sin must be on cpu like x, got meta"),
        ({"sin": [1.0]}, "sin must be a tensor, got list"),
        ({"x": [1.0]}, "x must be a tensor, got list"),
        ({"x": torch.zeros(8)}, "x must be [..., H, D], got [8]"),
        ({"x": X[:, :, :0]}, "x must be [..., H, D] with no empty row, got [2, 5, 0, 8]"),
        ({"interleaved": 1}, "interleaved must be True or False, got 1"),
        ({"rounding": "exact"}, "rounding must be one of separate, complex_eager, got 'exact'"),
    ],
)  # fmt: skip
def test_argument_that_does_not_fit_is_refused_by_one_sentence(changes, message):
    arguments = {"x": X, "cos": TABLE, "sin": TABLE, **changes}
    with pytest.raises(ArgumentError) as caught:
        multi_axis_rope(**arguments)
    assert str(caught.value) == f"multi_axis_rope: {message}"


def test_table_without_gradient_mode_is_refused_all_the_same():
    with torch.no_grad(), pytest.raises(ArgumentError, match="cos must be without gradient"):
        multi_axis_rope(X, TABLE.clone().requires_grad_(), TABLE)


def test_operator_of_torch_beyond_its_columns_is_refused():
    table = torch.zeros(2, 5, 5)
    with pytest.raises(ArgumentError) as caught:
        torch.ops.rlk.multi_axis_rope(X, table, table, True, "separate", "golden")
    assert str(caught.value) == ("multi_axis_rope: cos must be such that 2 * P <= D = 8, got P = 5")
