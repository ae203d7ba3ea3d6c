# SPDX-License-Identifier: Apache-2.0
"""Golden row sums against the written order in MPFR arithmetic, and sums worked out by hand."""

import gmpy2
import pytest
import torch

from rlk.compare import assert_same_bits
from rlk.reduce.row_sum import golden, hard_cases

# MPFR's view of FP32: emin and emax are for significands in [0.5, 1).
FP32 = gmpy2.context(precision=24, emin=-148, emax=128, subnormalize=True)


def in_written_order(a: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    """Row sums of a, or of a * b, one scalar operation after another."""
    with gmpy2.context(FP32):
        b_rows = [None] * len(a) if b is None else b.tolist()
        sums = [one_row(left, right) for left, right in zip(a.tolist(), b_rows, strict=True)]
    return torch.tensor([float(s) for s in sums], dtype=torch.float64).float()


def one_row(a: list[float], b: list[float] | None) -> gmpy2.mpfr:
    """The chunk-256 order for one row."""
    total = gmpy2.mpfr(0)
    for chunk in range(0, len(a), 256):
        lanes = []
        for lane in range(chunk, chunk + 256, 8):
            lanes.append(gmpy2.mpfr(0))
            for i in range(lane, min(lane + 8, len(a))):
                if b is None:
                    lanes[-1] = lanes[-1] + gmpy2.mpfr(a[i])
                else:
                    lanes[-1] = gmpy2.fma(gmpy2.mpfr(a[i]), gmpy2.mpfr(b[i]), lanes[-1])
        while len(lanes) > 1:
            lanes = [lanes[i] + lanes[i + 1] for i in range(0, len(lanes), 2)]
        total = total + lanes[0]
    return total + gmpy2.mpfr(0)


@pytest.mark.parametrize("length", hard_cases.LENGTHS)
def test_row_sum_hard_rows_equal_written_order(length: int) -> None:
    terms = hard_cases.rows(length)
    assert_same_bits(golden.row_sum(terms), in_written_order(terms, None))


@pytest.mark.parametrize("length", hard_cases.LENGTHS)
def test_row_dot_hard_rows_equal_written_order(length: int) -> None:
    a, b = hard_cases.rows(length), hard_cases.rows(length, seed=1)
    assert_same_bits(golden.row_dot(a, b), in_written_order(a, b))
    assert_same_bits(golden.row_dot(a, a), in_written_order(a, a))


def test_row_sum_and_dot_longest_row_equal_written_order() -> None:
    a = hard_cases.rows(65537)[1:2]
    assert_same_bits(golden.row_sum(a), in_written_order(a, None))
    assert_same_bits(golden.row_dot(a, a), in_written_order(a, a))


@pytest.mark.parametrize("name", hard_cases.known_sums())
def test_row_sum_known_row_gives_known_sum(name: str) -> None:
    terms, expected = hard_cases.known_sums()[name]
    assert_same_bits(golden.row_sum(terms), torch.tensor([expected]))
    # A factor of 1 leaves one rounding, that of the addition.
    assert_same_bits(golden.row_dot(terms, torch.ones_like(terms)), torch.tensor([expected]))


def test_row_dot_product_is_not_rounded() -> None:
    step = 2.0**-12
    a = torch.tensor([[-(1 + 2 * step), 1 + step]])
    b = torch.tensor([[1.0, 1 + step]])
    assert_same_bits(golden.row_dot(a, b), torch.tensor([2.0**-24]))


def test_row_sum_no_rows_gives_no_sums() -> None:
    empty = torch.empty(0, 1000)
    assert_same_bits(golden.row_sum(empty), torch.empty(0))
    assert_same_bits(golden.row_dot(empty, empty), torch.empty(0))


def test_row_sum_strided_rows_equal_contiguous_ones() -> None:
    terms = hard_cases.rows(257)
    strided = terms.T.contiguous().T
    assert_same_bits(golden.row_sum(strided), in_written_order(terms, None))
    assert_same_bits(golden.row_dot(strided, terms), in_written_order(terms, terms))
