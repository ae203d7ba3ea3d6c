# SPDX-License-Identifier: Apache-2.0
"""Column sums that are easily wrong, with answers worked out by hand."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

_FP32, _BF16, _FP16 = torch.float32, torch.bfloat16, torch.float16
_INF, _NAN = math.inf, math.nan
_TINY = 2.0**-149  # the smallest FP32
_FLT_MAX = (2 - 2.0**-23) * 2.0**127


@dataclass(frozen=True)
class Case:
    """One column: values with their counts, in order, and its sum in some destinations."""

    name: str
    terms: tuple[tuple[float, int], ...]
    sums: Mapping[torch.dtype, float]

    def column(self) -> torch.Tensor:
        """The rows [R, 1], FP32."""
        values = [value for value, count in self.terms for _ in range(count)]
        return torch.tensor(values, dtype=_FP32)[:, None]


def _everywhere(value: float) -> dict[torch.dtype, float]:
    return {_FP32: value, _BF16: value, _FP16: value}


def _sums(float32: float, bfloat16: float, float16: float) -> dict[torch.dtype, float]:
    return {_FP32: float32, _BF16: bfloat16, _FP16: float16}


_ZEROS = (
    Case("empty", (), _everywhere(0.0)),
    Case("negative_zeros", ((-0.0, 3),), _everywhere(0.0)),
    Case("zeros_of_both_signs", ((-0.0, 1), (0.0, 1), (-0.0, 1)), _everywhere(0.0)),
    Case(
        "cancelled_to_zero",
        ((-1.0, 1), (_FLT_MAX, 1), (1.0, 1), (-_FLT_MAX, 1)),
        _everywhere(0.0),
    ),
    Case("negative_below_half", ((_TINY, 1), (-2 * _TINY, 1)), _sums(-_TINY, -0.0, -0.0)),
    Case("positive_below_half", ((2 * _TINY, 1), (-_TINY, 1)), _sums(_TINY, 0.0, 0.0)),
)

_ALTERNATING = ((2.0**127, 1), (-(2.0**127), 1)) * 150
_CANCELLING = (
    # Any FP32 tree absorbs ones into the pair. 6030 is 188.4 steps of 32 in BF16, and 1507.5
    # steps of 4 in FP16: a tie, to the even 1508.
    Case(
        "ones_and_a_large_pair",
        ((2.0**26, 1), (1.0, 6030), (-(2.0**26), 1)),
        _sums(6030, 6016, 6032),
    ),
    Case(
        "one_between_a_distant_pair",
        ((2.0**100, 1), (1 + 2.0**-23, 1), (-(2.0**100), 1)),
        _sums(1 + 2.0**-23, 1.0, 1.0),
    ),
    Case("alternating_extremes", _ALTERNATING, _everywhere(0.0)),
    Case("alternating_extremes_and_tiny", (*_ALTERNATING, (-_TINY, 1)), _sums(-_TINY, -0.0, -0.0)),
    # 2^-149 + ... + 2^126 = 2^127 - 2^-149.
    Case(
        "every_exponent",
        (*((2.0**e, 1) for e in range(-149, 127)), (-(2.0**127), 1)),
        _sums(-_TINY, -0.0, -0.0),
    ),
    Case("carry_into_normal", ((2.0**-126 - _TINY, 1), (_TINY, 1)), {_FP32: 2.0**-126}),
    Case("borrow_through_every_limb", ((2.0**127, 1), (-_TINY, 1)), {_FP32: 2.0**127}),
    Case("many_more_than_fit", ((_FLT_MAX, 300), (-_FLT_MAX, 299)), {_FP32: _FLT_MAX}),
)


def _tie(dtype: torch.dtype, step: float, below: int, side: int, sign: int) -> Case:
    """Around the middle between `below` and `below + 1` steps: even wins only at side 0."""
    up = {-1: 0, 0: below % 2, 1: 1}[side]
    name = str(dtype).removeprefix("torch.")
    terms = (below * step, step / 2, side * _TINY)
    return Case(
        f"tie_{name}_{step}_{below}_{side}_{sign}",
        tuple((sign * term, 1) for term in terms),
        {dtype: math.copysign((below + up) * step, sign)},
    )


# Of each destination an even, an odd and the last value of a binade, also among subnormals.
_STEPS = (
    (_FP32, 1.0, (2**23, 2**23 + 1, 2**24 - 1)),
    (_BF16, 2.0, (2**7, 2**7 + 1, 2**8 - 1)),
    (_BF16, 2.0**-133, (0, 1, 2**7 - 1)),
    (_FP16, 1.0, (2**10, 2**10 + 1, 2**11 - 1)),
    (_FP16, 2.0**-24, (0, 1, 2**10 - 1)),
)
_TIES = tuple(
    _tie(dtype, step, below, side, sign)
    for dtype, step, values in _STEPS
    for below in values
    for side in (-1, 0, 1)
    for sign in (1, -1)
)


def _overflow(dtype: torch.dtype, largest: float, half: float) -> tuple[Case, ...]:
    """Around half a step above the largest finite value, where Inf begins."""
    name = str(dtype).removeprefix("torch.")
    return (
        Case(f"half_step_over_{name}", ((largest, 1), (half, 1)), {dtype: _INF}),
        Case(f"just_fits_{name}", ((largest, 1), (half, 1), (-_TINY, 1)), {dtype: largest}),
        Case(f"twice_{name}", ((-largest, 2),), {dtype: -_INF}),
        Case(f"returns_into_{name}", ((largest, 2), (-largest, 1)), {dtype: largest}),
    )


_OVERFLOWS = (
    *_overflow(_FP32, _FLT_MAX, 2.0**103),
    *_overflow(_BF16, (2 - 2.0**-7) * 2.0**127, 2.0**119),
    *_overflow(_FP16, 65504.0, 16.0),
    Case("beyond_the_narrow_formats", ((_FLT_MAX, 1),), _sums(_FLT_MAX, _INF, _INF)),
)

_SPECIAL = (
    Case("all_nan", ((_NAN, 300),), _everywhere(_NAN)),
    Case("one_nan", ((1.0, 5), (_NAN, 1), (_INF, 1)), _everywhere(_NAN)),
    Case("infinity", ((1.0, 5), (_INF, 2)), _everywhere(_INF)),
    Case("negative_infinity", ((_FLT_MAX, 2), (-_INF, 1)), _everywhere(-_INF)),
    Case("infinities_of_both_signs", ((_INF, 1), (-_INF, 1)), _everywhere(_NAN)),
)

CASES = (*_ZEROS, *_CANCELLING, *_TIES, *_OVERFLOWS, *_SPECIAL)
