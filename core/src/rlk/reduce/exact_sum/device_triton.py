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
# A term below 2^40 is cut into multiples of 2^-4, below half of that multiples of 2^-48, and what
# is left. Where it is 0 or at least 2^-69, that is a multiple of 2^-92. 256 terms of each level are
# then below 2^53 of its multiples, so that no FP64 addition rounds.
MAX_TERMS = tl.constexpr(256)
LARGEST = tl.constexpr(2.0**40)
SMALLEST = tl.constexpr(2.0**-69)
# FP64 numbers of this size are multiples of the level's: adding one and taking it away rounds.
_ROUND_TO_FIRST = tl.constexpr(1.5 * 2.0 ** (52 - 4))
_ROUND_TO_SECOND = tl.constexpr(1.5 * 2.0 ** (52 - 48))
# 149: limbs count multiples of 2^-149.
_FIRST_BASE = tl.constexpr(149 - 4)
_SECOND_BASE = tl.constexpr(149 - 48)
_THIRD_BASE = tl.constexpr(149 - 92)


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
def no_terms(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Empty levels, and a note of terms that they do not take, for `add_terms`."""
    level = tl.zeros((ROWS, COLUMNS), tl.float64)
    return level, level, level, tl.zeros((ROWS, COLUMNS // 8), tl.int32)


@triton.jit
def add_terms(first, second, third, missed, c):
    """Add FP32 contributions c [R, C] that `takes` to levels of at most 255 before; note others.

    Levels are sums of each place of a block: nothing crosses threads before `add_levels`.
    """
    taken = takes(c)
    rest = tl.where(taken, c, 0.0).to(tl.float64)
    head = (rest + _ROUND_TO_FIRST) - _ROUND_TO_FIRST
    first += head
    rest -= head
    head = (rest + _ROUND_TO_SECOND) - _ROUND_TO_SECOND
    second += head
    third += rest - head
    # Eight columns are those of a thread.
    eight = tl.reshape(tl.where(taken, 0, 1), (c.shape[0], c.shape[1] // 8, 8))
    return first, second, third, missed | tl.max(eight, 2)


@triton.jit
def takes(c):
    """Where contributions fit the levels of `add_terms`; NaN and Inf do not."""
    magnitude = tl.abs(c)
    return (magnitude < LARGEST) & ((magnitude >= SMALLEST) | (c == 0.0))


@triton.jit
def add_levels(state_ptr, column_offsets, columns, first, second, third):
    """Add levels [R, C], R <= 256, to the state."""
    _add_level(state_ptr, column_offsets, columns, first * 2.0**4, _FIRST_BASE)
    _add_level(state_ptr, column_offsets, columns, second * 2.0**48, _SECOND_BASE)
    _add_level(state_ptr, column_offsets, columns, third * 2.0**92, _THIRD_BASE)


@triton.jit
def _add_level(state_ptr, column_offsets, columns, multiples, BASE: tl.constexpr):
    total = tl.sum(multiples.to(tl.int64), 0)  # [C]
    base = tl.full(total.shape, BASE, tl.int32)
    add_limbs(state_ptr, column_offsets, columns, total, base)


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
