# SPDX-License-Identifier: Apache-2.0
"""Exact quotients of sums, rounded once, against rational arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from rlk.compare import assert_same_bits, same_bits
from rlk.errors import ArgumentError, BackendError
from rlk.reduce import exact_sum

# Significand bits, exponent of the smallest subnormal, and the first power of two too large.
DESTINATIONS = {
    torch.float32: (24, -149, 128),
    torch.bfloat16: (8, -133, 128),
    torch.float16: (11, -24, 16),
}
MOST = 2**47 - 1
DIVISORS = (1, 2, 3, 5, 7, 8, 10, 255, 4096, 6_889, 262_144, 1_000_003, 2**31 - 1, 2**40, MOST)
COLUMNS = 300
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
        ],
    ),
]


def nearest(value: Fraction, dtype: torch.dtype) -> float:
    """`value` rounded to nearest even in `dtype`, a zero with the sign of what became zero."""
    precision, smallest, too_large = DESTINATIONS[dtype]
    if value == 0:
        return 0.0
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent  # floor(log2(size))
    step = Fraction(2) ** max(exponent - precision + 1, smallest)
    rounded = round(size / step) * step  # Fraction rounds halves to even
    magnitude = math.inf if rounded >= Fraction(2) ** too_large else float(rounded)
    return math.copysign(magnitude, value)


def state_of(totals: list[int]) -> torch.Tensor:
    """The state that holds these whole numbers of 2^-149."""
    state = exact_sum.new(len(totals))
    for column, total in enumerate(totals):
        for limb in range(9):
            state[limb, column] = total >> 32 * limb & 0xFFFFFFFF
        state[9, column] = total >> 288
    return state


def spread(generator: np.random.Generator) -> list[int]:
    """Totals of either sign and any size up to the whole range of a state."""
    lengths = generator.integers(0, 300, COLUMNS).tolist()
    sizes = [int.from_bytes(generator.bytes(40), "little") >> 320 - n for n in lengths]
    signs = generator.choice([-1, 1], COLUMNS).tolist()
    return [size * sign for size, sign in zip(sizes, signs, strict=True)]


def near_ties(generator: np.random.Generator, divisor: int) -> list[int]:
    """Totals whose quotient is half a step of a destination, or next to it."""
    totals = []
    for _ in range(COLUMNS):
        precision, smallest, _ = list(DESTINATIONS.values())[generator.integers(3)]
        kept = int(generator.integers(0, 1 << precision))
        lowest = smallest + 149 + int(generator.integers(0, 40)) * int(generator.integers(0, 2))
        # In half units of 2^-149: half a step below the unit exists too.
        double = (2 * kept + 1 << lowest) * divisor
        nudge = int(generator.integers(-2, 3))
        totals.append((double + nudge) // 2 * (-1 if generator.integers(2) else 1))
    return totals


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("divisor", DIVISORS)
def test_quotient_any_sum_is_the_nearest_to_the_rational_one(divisor: int, device: str) -> None:
    generator = np.random.default_rng(divisor)
    for totals in (spread(generator), near_ties(generator, divisor), [0, 1, -1, divisor, -divisor]):
        state = state_of(totals).to(device)
        for dtype in DESTINATIONS:
            found = exact_sum.round(state, dtype, divide_by=divisor, backend="golden").cpu()
            quotients = [Fraction(t, divisor) * Fraction(2) ** -149 for t in totals]
            expected = [nearest(q, dtype) for q in quotients]
            # FP64 holds every value of the destinations.
            whole = torch.tensor(expected, dtype=torch.float64).to(dtype)
            assert_same_bits(found, whole, f"{dtype} / {divisor}")


def test_quotient_of_a_sum_beyond_float32_is_finite() -> None:
    large = torch.full((6, 1), torch.finfo(torch.float32).max)
    state = exact_sum.add_rows(exact_sum.new(1), large)
    assert exact_sum.round(state, torch.float32).item() == math.inf
    assert exact_sum.round(state, torch.float32, divide_by=6).item() == large[0].item()
    assert exact_sum.round(state, torch.float32, divide_by=5).item() == math.inf


def test_quotient_of_nan_and_infinities_is_what_their_sum_is() -> None:
    rows = torch.tensor([[math.nan, math.inf, -math.inf, math.inf], [1.0, 1.0, 1.0, -math.inf]])
    state = exact_sum.add_rows(exact_sum.new(4), rows)
    for dtype in DESTINATIONS:
        plain = exact_sum.round(state, dtype)
        assert_same_bits(exact_sum.round(state, dtype, divide_by=3), plain, str(dtype))


def test_quotient_differs_from_dividing_what_was_rounded() -> None:
    rows = torch.randn(64, 500, generator=torch.Generator().manual_seed(0))
    state = exact_sum.add_rows(exact_sum.new(500), rows)
    for dtype in DESTINATIONS:
        once = exact_sum.round(state, dtype, divide_by=7)
        assert not same_bits(once, exact_sum.round(state, dtype) / 7)


@pytest.mark.parametrize("divisor", [0, -3, 1.0, True, "2", None, 2**47], ids=repr)
def test_quotient_divisor_that_is_no_count_is_refused(divisor: object) -> None:
    with pytest.raises(ArgumentError) as caught:
        exact_sum.round(exact_sum.new(3), torch.float32, divide_by=divisor)
    assert str(caught.value) == (
        f"exact_sum: divide_by must be an int, at least 1 and less than 2^47, got {divisor!r}"
    )


def test_quotient_by_a_backend_that_cannot_divide_is_refused() -> None:
    with pytest.raises(BackendError) as caught:
        exact_sum.round(exact_sum.new(3), torch.float32, divide_by=3, backend="triton")
    assert str(caught.value) == (
        "exact_sum: backend must be \"golden\" or None for a quotient, got 'triton'"
    )
