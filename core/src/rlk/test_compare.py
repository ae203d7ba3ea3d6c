# SPDX-License-Identifier: Apache-2.0
"""Bits are compared, not values: signed zeros count, NaN payloads do not."""

import hashlib

import pytest
import torch

from rlk import compare

INTEGERS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
# Bit patterns of +0, -0, 1, quiet NaN, negative NaN, NaN with payload.
PATTERNS = {
    torch.float16: (0x0000, 0x8000, 0x3C00, 0x7E00, 0xFE00, 0x7C01),
    torch.bfloat16: (0x0000, 0x8000, 0x3F80, 0x7FC0, 0xFFC0, 0x7F81),
    torch.float32: (0, 0x80000000, 0x3F800000, 0x7FC00000, 0xFFC00000, 0x7F800001),
    torch.float64: (0, 1 << 63, 0x3FF << 52, 0x7FF8 << 48, 0xFFF8 << 48, (0x7FF << 52) + 1),
}
every_float = pytest.mark.parametrize("dtype", INTEGERS, ids=str)


def from_bits(patterns, dtype):
    """A tensor of these bit patterns."""
    width = 8 * dtype.itemsize
    signed = [p - (1 << width) if p >> (width - 1) else p for p in patterns]
    return torch.tensor(signed, dtype=INTEGERS[dtype]).view(dtype)


@every_float
def test_same_bits_signed_zeros_differ(dtype):
    plus, minus = (from_bits([p], dtype) for p in PATTERNS[dtype][:2])
    assert torch.equal(plus, minus)
    assert not compare.same_bits(plus, minus)
    assert compare.digest(plus) != compare.digest(minus)
    assert compare.first_mismatch(minus, plus).ulp_histogram == {"0": 1}


@every_float
def test_same_bits_any_nan_equals_any_nan(dtype):
    nans = [from_bits([p, PATTERNS[dtype][2]], dtype) for p in PATTERNS[dtype][3:]]
    for nan in nans:
        assert nan[0].isnan()
        assert compare.same_bits(nan, nans[0])
        assert compare.digest(nan) == compare.digest(nans[0])
        assert compare.ulp_distance(nan, nans[0]).tolist() == [0, 0]


@every_float
def test_same_bits_nan_differs_from_a_number(dtype):
    one, nan = from_bits(PATTERNS[dtype][2:4], dtype)
    assert not compare.same_bits(nan, one)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.zeros(3, 2), "y is float32 [3, 2], expected float32 [2, 3]"),
        (torch.zeros(6), "y is float32 [6], expected float32 [2, 3]"),
        (torch.zeros(2, 3).half(), "y is float16 [2, 3], expected float32 [2, 3]"),
        (torch.zeros(2, 3).int(), "y is int32 [2, 3], expected float32 [2, 3]"),
    ],
)
def test_assert_same_bits_other_shape_or_dtype_is_named(other, message):
    assert not compare.same_bits(other, torch.zeros(2, 3))
    with pytest.raises(AssertionError) as caught:
        compare.assert_same_bits(other, torch.zeros(2, 3), "y")
    assert str(caught.value) == message


def test_assert_same_bits_mismatch_is_described():
    expected = torch.ones(2, 3, 4)
    actual = expected.clone()
    actual[1, 0, 2] = 1 + 2**-23
    actual[1, 2, 3] = 1 + 2**-22
    compare.assert_same_bits(expected, expected.clone())
    with pytest.raises(AssertionError) as caught:
        compare.assert_same_bits(actual, expected, "dx")
    assert str(caught.value) == (
        "dx: 2 of 24 elements differ, first at [1, 0, 2]: 1.0000001192092896 (0x3f800001) "
        "instead of 1.0 (0x3f800000); ulp {'0': 22, '1': 1, '2': 1}"
    )


def test_first_mismatch_negative_bfloat16_shows_its_unsigned_pattern():
    mismatch = compare.first_mismatch(*from_bits([0xBF80, 0x0000], torch.bfloat16).split(1))
    assert (mismatch.actual, mismatch.expected) == ("-1.0 (0xbf80)", "0.0 (0x0000)")
    assert (mismatch.index, mismatch.count, mismatch.total) == ((0,), 1, 1)


@every_float
def test_first_mismatch_scalar_has_an_empty_index(dtype):
    a, b = torch.tensor(1.0, dtype=dtype), torch.tensor(2.0, dtype=dtype)
    assert compare.first_mismatch(a, b).index == ()
    assert compare.first_mismatch(a, a.clone()) is None


def test_first_mismatch_strided_tensor_is_indexed_by_position():
    base = torch.arange(12.0).reshape(3, 4)
    actual = base.t().contiguous().t()
    actual[2, 1] = -1
    assert actual.stride() != base.stride()
    assert compare.first_mismatch(actual, base).index == (2, 1)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_same_bits_empty_tensors_agree_if_their_shapes_do(shape):
    assert compare.same_bits(torch.empty(shape), torch.empty(shape))
    assert compare.first_mismatch(torch.empty(shape), torch.empty(shape)) is None
    assert not compare.same_bits(torch.empty(shape), torch.empty(0, 7))
    assert compare.ulp_histogram(torch.empty(shape), torch.empty(shape)) == {}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_first_mismatch_integers_are_compared_without_ulp(dtype):
    a, b = torch.tensor([0, 1, 0]).to(dtype), torch.tensor([0, 1, 1]).to(dtype)
    assert compare.same_bits(a, a.clone())
    mismatch = compare.first_mismatch(a, b)
    assert (mismatch.index, mismatch.ulp_histogram) == ((2,), {})


@every_float
def test_ulp_histogram_known_distances_fall_into_their_classes(dtype):
    one = PATTERNS[dtype][2]
    distances = (0, 0, 1, 2, 3, 4, 5, 8, 9, 16, 17)
    expected = from_bits([one] * len(distances), dtype)
    for sign in (1, -1):
        actual = from_bits([one + sign * d for d in distances], dtype)
        assert compare.ulp_distance(actual, expected).tolist() == list(distances)
        assert compare.ulp_histogram(actual, expected) == {
            "0": 2, "1": 1, "2": 1, "3-4": 2, "5-8": 2, "9-16": 2, "17-32": 1,
        }  # fmt: skip


@every_float
def test_ulp_distance_across_zero_counts_both_sides(dtype):
    minus_zero = PATTERNS[dtype][1]
    smallest, negative = from_bits([1], dtype), from_bits([minus_zero + 1], dtype)
    assert compare.ulp_distance(smallest, negative).tolist() == [2]


def test_ulp_distance_between_ends_of_float64_is_not_wrapped():
    largest = torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64)
    wide = (largest, -largest, torch.zeros_like(largest))
    most = torch.iinfo(torch.int64).max
    assert compare.ulp_distance(wide[0], wide[1]).tolist() == [most]
    assert compare.ulp_distance(wide[1], wide[0]).tolist() == [most]
    assert compare.ulp_distance(wide[0], wide[2]).tolist() == [0x7FEFFFFFFFFFFFFF]


def test_digest_known_bytes_are_hashed_with_dtype_and_shape():
    tensor = torch.tensor([[1.0, -0.0]])
    text = b"torch.float32 [1, 2]\n" + bytes.fromhex("0000803f00000080")
    assert compare.digest(tensor) == hashlib.sha256(text).hexdigest()
    assert compare.digest(tensor.t()) != compare.digest(tensor)
    assert compare.digest(tensor.bfloat16()) != compare.digest(tensor)


def test_same_bits_parameter_and_negated_view_are_compared_by_value():
    values = torch.tensor([1.0, -2.0])
    conjugated = torch.complex(torch.zeros(2), values).conj().imag
    assert conjugated.is_neg()
    assert compare.same_bits(torch.nn.Parameter(values), values)
    assert compare.same_bits(conjugated, torch.tensor([-1.0, 2.0]))
