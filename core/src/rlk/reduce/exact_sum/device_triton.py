# SPDX-License-Identifier: Apache-2.0
"""Exact column sums inside Triton kernels, on integer bits only.

A state is int64 [13, columns]; `state_ptr` points to its first element, `column_offsets` [C]
are columns of it and `columns` is the distance between its rows.
"""

import triton
import triton.language as tl

LIMBS = tl.constexpr(10)
NAN_COUNT = tl.constexpr(10)
DIGIT = tl.constexpr(0xFFFFFFFF)
# Bit positions of values that do not enter the limbs.
NOTHING = tl.constexpr(-1)
SPECIAL = tl.constexpr(254)
# 256 rows of 24-bit significands shifted by up to 31 stay below 2^63.
MAX_ROWS = tl.constexpr(256)
WINDOW = tl.constexpr(32)
# Levels hold terms of a window of binades: multiples of a unit, and below half of it multiples of
# 2^-46 units. 256 terms below 2^45 units, none of them but 0 below 2^-23 units, are of each level
# at most 2^53 of its multiples, so that no FP64 addition rounds.
MAX_TERMS = tl.constexpr(256)
_LARGEST = tl.constexpr(2.0**45)
_SMALLEST = tl.constexpr(2.0**-23)
# FP64 numbers of so many units are multiples of it: adding one and taking it away rounds.
_ROUND_TO_UNIT = tl.constexpr(1.5 * 2.0**52)
# 33: binades between a unit and the largest term that it is chosen by. Terms 2^11 times as large
# and 2^-56 times as small are still in the window.
_UNIT_BELOW = tl.constexpr(33)
# Exponent fields of units whose windows hold normal numbers only, and of the unit 2^-33.
_LOWEST_UNIT = tl.constexpr(127 - 103)
_HIGHEST_UNIT = tl.constexpr(127 + 72)
_USUAL_UNIT = tl.constexpr(127 - 33)


@triton.jit
def add_block(state_ptr, column_offsets, columns, c, mask):
    """Add FP32 contributions c [R, C], R <= 256, to the state where `mask` [R, C] holds.

    Each pass sums, per column, the values within 32 binades of the largest one left. All
    additions are integer, so neither passes nor blocks show in the bits.
    """
    tl.static_assert(c.shape[0] <= MAX_ROWS, "add_block takes at most 256 rows")
    m, p = split(c, mask)  # [R, C]
    top = tl.max(p)
    if top == SPECIAL:
        count_special(state_ptr, column_offsets, columns, m, p)
        p = tl.where(p == SPECIAL, NOTHING, p)
        top = tl.max(p)
    while top >= 0:
        base = tl.maximum(tl.max(p, 0) - (WINDOW - 1), 0)  # [C]
        inside = p >= base[None, :]
        shift = tl.where(inside, p - base[None, :], 0).to(tl.int64)
        total = tl.sum(tl.where(inside, m.to(tl.int64) << shift, 0), 0)  # [C]
        add_limbs(state_ptr, column_offsets, columns, total, base)
        p = tl.where(inside, NOTHING, p)
        top = tl.max(p)


@triton.jit
def window(c):
    """The unit of levels for terms like c: a power of two, FP32. No bit of a sum depends on it."""
    exponent = tl.max((c.to(tl.int32, bitcast=True) >> 23) & 255)
    unit = tl.minimum(tl.maximum(exponent - _UNIT_BELOW, _LOWEST_UNIT), _HIGHEST_UNIT)
    # All are zero, or one is no number.
    unit = tl.where((exponent == 0) | (exponent == 255), _USUAL_UNIT, unit)
    return (unit << 23).to(tl.float32, bitcast=True)


@triton.jit
def no_terms(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Empty levels, and a note of terms that they do not take, for `add_terms`."""
    level = tl.zeros((ROWS, COLUMNS), tl.float64)
    return level, level, tl.zeros((ROWS, COLUMNS // 8), tl.int32)


@triton.jit
def add_terms(upper, lower, missed, c, unit):
    """Add FP32 contributions c [R, C] that `takes` to levels of at most 255 before; note others.

    Levels are sums of each place of a block: nothing crosses threads before `add_levels`.
    """
    taken = tl.where(_inside(c, unit), c, 0.0)
    rest = taken.to(tl.float64)
    shift = unit.to(tl.float64) * _ROUND_TO_UNIT
    head = (rest + shift) - shift
    upper += head
    lower += rest - head
    # Not zero where a term is lost; zeros of either sign are not.
    lost = (c.to(tl.int32, bitcast=True) ^ taken.to(tl.int32, bitcast=True)) & 0x7FFFFFFF
    # Eight columns are those of a thread.
    eight = tl.reshape(lost, (c.shape[0], c.shape[1] // 8, 8))
    return upper, lower, missed | tl.max(eight, 2)


@triton.jit
def _inside(c, unit):
    """Where contributions are numbers that levels hold; zeros, which add nothing, are not."""
    magnitude = tl.abs(c)
    return (magnitude < unit * _LARGEST) & (magnitude >= unit * _SMALLEST)


@triton.jit
def takes(c, unit):
    """Where contributions need no more than `add_terms`; NaN and Inf do."""
    return _inside(c, unit) | (c == 0.0)


@triton.jit
def add_levels(state_ptr, column_offsets, columns, upper, lower, unit):
    """Add levels [R, C], R <= 256, to the state."""
    exponent = unit.to(tl.int32, bitcast=True) >> 23
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True).to(tl.float64)
    # Limbs count multiples of 2^-149, an exponent field those of 2^-127.
    base = exponent + (149 - 127)
    _add_level(state_ptr, column_offsets, columns, upper * inverse, base)
    _add_level(state_ptr, column_offsets, columns, lower * (inverse * 2.0**46), base - 46)


@triton.jit
def _add_level(state_ptr, column_offsets, columns, multiples, base):
    total = tl.sum(multiples.to(tl.int64), 0)  # [C]
    add_limbs(state_ptr, column_offsets, columns, total, tl.zeros(total.shape, tl.int32) + base)


@triton.jit
def split(c, mask):
    """FP32 as m * 2^(p - 149): |m| < 2^24, and p, SPECIAL for Inf and NaN, NOTHING for zero."""
    bits = c.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) & 255
    fraction = bits & 0x7FFFFF
    m = tl.where(exponent == 0, fraction, fraction | 0x800000)
    p = tl.where(mask & (m != 0), tl.maximum(exponent, 1) - 1, NOTHING)
    return tl.where(bits < 0, -m, m), p


@triton.jit
def count_special(state_ptr, column_offsets, columns, m, p):
    """Count NaN, +Inf and -Inf, whose significands are above, at and minus 2^23."""
    special = p == SPECIAL
    infinity: tl.constexpr = 0x800000
    at = state_ptr + NAN_COUNT * tl.cast(columns, tl.int64) + column_offsets
    is_nan = (m > infinity) | (m < -infinity)
    _add_piece(at, tl.sum((special & is_nan).to(tl.int64), 0))
    _add_piece(at + columns, tl.sum((special & (m == infinity)).to(tl.int64), 0))
    _add_piece(at + columns + columns, tl.sum((special & (m == -infinity)).to(tl.int64), 0))


@triton.jit
def add_limbs(state_ptr, column_offsets, columns, total, base):
    """Add total * 2^base [C], |total| < 2^63, 0 <= base <= 222, to the limbs atomically."""
    negative = total < 0
    magnitude = tl.where(negative, -total, total)
    offset = (base & 31).to(tl.int64)
    # What this shift loses is in `high`.
    low = (magnitude << offset) & DIGIT
    high = magnitude >> (32 - offset)
    at = state_ptr + (base >> 5).to(tl.int64) * columns + column_offsets
    _add_piece(at, tl.where(negative, -low, low))
    middle = high & DIGIT
    _add_piece(at + columns, tl.where(negative, -middle, middle))
    high = high >> 32
    _add_piece(at + columns + columns, tl.where(negative, -high, high))


@triton.jit
def _add_piece(at, piece):
    # The launch boundary orders these additions before any reader.
    tl.atomic_add(at, piece, mask=piece != 0, sem="relaxed")


@triton.jit
def normalise_limbs(state_ptr, column_offsets, columns, mask):
    """Carry until the digits are in [0, 2^32) below the signed top limb."""
    carry = tl.zeros(column_offsets.shape, tl.int64)
    _carry(state_ptr + column_offsets, columns, carry, mask, LIMBS - 1)


@triton.jit
def _carry(at, columns, carry, mask, ABOVE: tl.constexpr):
    value = tl.load(at, mask=mask, other=0) + carry
    if ABOVE > 0:
        # Stored when all above are loaded: no load waits for a store.
        _carry(at + columns, columns, value >> 32, mask, ABOVE - 1)
        tl.store(at, value & DIGIT, mask=mask)
    else:
        tl.store(at, value, mask=mask)


@triton.jit
def round_limbs(
    state_ptr,
    column_offsets,
    columns,
    mask,
    PRECISION: tl.constexpr,
    LOWEST_BIT: tl.constexpr,
    INFINITY: tl.constexpr,
    SIGN: tl.constexpr,
):
    """The sums [C] rounded once, to nearest even, as int32 bit patterns of the destination.

    `Format` in golden.py says what the constants mean.
    """
    at = state_ptr + column_offsets
    negative = _top_limb(at, columns, mask) < 0
    top, digit, next_digit, below, overflow = _leading_limbs(at, columns, mask, negative)
    bits = _round_leading(top, digit, next_digit, below, PRECISION, LOWEST_BIT)
    bits = tl.where(overflow, INFINITY, tl.minimum(bits, INFINITY))

    at += LIMBS * tl.cast(columns, tl.int64)
    nan = tl.load(at, mask=mask, other=0) > 0
    positive_infinity = tl.load(at + columns, mask=mask, other=0) > 0
    negative_infinity = tl.load(at + columns + columns, mask=mask, other=0) > 0
    infinite = positive_infinity | negative_infinity
    bits = tl.where(infinite, INFINITY, bits)
    negative = tl.where(infinite, negative_infinity, negative)
    bits = tl.where(negative, bits + SIGN, bits)
    quiet: tl.constexpr = INFINITY | (1 << (PRECISION - 2))
    return tl.where(nan | (positive_infinity & negative_infinity), quiet, bits).to(tl.int32)


@triton.jit
def _top_limb(at, columns, mask):
    """The top limb after carrying, which has the sign of the sum."""
    value = tl.load(at, mask=mask, other=0)
    for _ in tl.static_range(LIMBS - 1):
        at += columns
        value = tl.load(at, mask=mask, other=0) + (value >> 32)
    return value


@triton.jit
def _leading_limbs(at, columns, mask, negative):
    """Of the magnitude: the top non-zero limb's index and digit, the next digit, whether
    anything is below, and whether the last limb is in use, which is beyond every format."""
    carry = tl.load(at, mask=mask, other=0) * 0
    top, digit, next_digit, previous = carry, carry, carry, carry
    below = carry != 0
    below_previous = below
    for k in tl.static_range(LIMBS - 1):
        value = tl.load(at, mask=mask, other=0)
        carry += tl.where(negative, -value, value)
        current = carry & DIGIT
        carry = carry >> 32
        leads = current != 0
        top = tl.where(leads, k, top)
        next_digit = tl.where(leads, previous, next_digit)
        below = tl.where(leads, below_previous, below)
        digit = tl.where(leads, current, digit)
        below_previous = below_previous | (previous != 0)
        previous = current
        at += columns
    value = tl.load(at, mask=mask, other=0)
    carry += tl.where(negative, -value, value)
    return top, digit, next_digit, below, carry != 0


@triton.jit
def _round_leading(
    top, digit, next_digit, below, PRECISION: tl.constexpr, LOWEST_BIT: tl.constexpr
):
    """Round to nearest even at the destination's lowest bit; the pattern as int64."""
    lowest = tl.maximum(32 * top + _bit_length(digit) - PRECISION, LOWEST_BIT)
    # The bit below `lowest` lies in the leading limb, in the next one, or above both.
    half = lowest - 1
    limb = half >> 5
    offset = half & 31
    in_next = limb < top
    in_top = limb == top
    pair = tl.where(in_next, (digit << 32) | next_digit, tl.where(in_top, digit, 0))
    rest = tl.where(in_next, 0, next_digit | tl.where(in_top, 0, digit))
    low_bits = pair & ((tl.full(offset.shape, 1, tl.int64) << offset) - 1)
    sticky = (low_bits != 0) | (rest != 0) | below
    kept = pair >> (offset + 1)
    up = ((pair >> offset) & 1) & (sticky.to(tl.int64) | (kept & 1))
    # The leading bit of `kept` adds one to the exponent field, as does a carry out of it.
    return ((lowest - LOWEST_BIT) << (PRECISION - 1)) + kept + up


@triton.jit
def _bit_length(digit):
    """Bits of a digit in [0, 2^32)."""
    length = digit * 0
    for k in tl.static_range(5):
        upper = digit >> (16 >> k)
        length += tl.where(upper != 0, 16 >> k, 0)
        digit = tl.where(upper != 0, upper, digit)
    return length + digit
