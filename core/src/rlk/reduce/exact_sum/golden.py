# SPDX-License-Identifier: Apache-2.0
"""Exact column sums in PyTorch integers: which bits every backend must give."""

from dataclasses import dataclass

import torch

# 10: 277 bits of FP32 range, the sign, and 42 bits for the number of rows.
LIMBS = 10
LIMB_BITS = 32
DIGIT = (1 << LIMB_BITS) - 1
NAN_COUNT, POSITIVE_INFINITIES, NEGATIVE_INFINITIES = LIMBS, LIMBS + 1, LIMBS + 2
STATE_ROWS = LIMBS + 3
# What a sum may be divided by: less than this.
DIVISORS = 1 << 47

# 2^19: elements per slice, so that each int64 temporary takes 4 MiB.
_SLICE = 1 << 19


@dataclass(frozen=True)
class Format:
    """A destination: significand bits, and the place of its lowest bit above 2^-149."""

    precision: int
    lowest_bit: int
    infinity: int
    storage: torch.dtype

    @property
    def nan(self) -> int:
        """The bit pattern of the quiet NaN without payload."""
        return self.infinity | 1 << (self.precision - 2)

    @property
    def sign(self) -> int:
        """What the sign bit adds to the pattern, read as a signed integer."""
        return torch.iinfo(self.storage).min


FORMATS = {
    torch.float32: Format(24, 0, 0x7F800000, torch.int32),
    torch.bfloat16: Format(8, 149 - 133, 0x7F80, torch.int16),
    torch.float16: Format(11, 149 - 24, 0x7C00, torch.int16),
}


def new(columns: int, device: torch.device | str | None = None) -> torch.Tensor:
    """The state of an empty sum, int64 [13, C]."""
    return torch.zeros(STATE_ROWS, columns, dtype=torch.int64, device=device)


def add_rows(state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The normalised state after adding rows [R, C] of FP32, BF16 or FP16."""
    state = normalise(state)
    for part in rows.split(max(1, _SLICE // max(1, rows.shape[1]))):
        _add_slice(state, part.to(torch.float32))
        _carry(state)
    return state


def merge(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The normalised state of the rows of both."""
    return normalise(a + b)


def normalise(state: torch.Tensor) -> torch.Tensor:
    """The same sum with digits in [0, 2^32) below the signed top limb."""
    state = state.clone()
    _carry(state)
    return state


def round(state: torch.Tensor, dtype: torch.dtype, divide_by: int = 1) -> torch.Tensor:
    """The sum, or an exact quotient of it, rounded once, to nearest even, to `dtype`."""
    form = FORMATS[dtype]
    limbs = normalise(state)[:LIMBS]
    negative = limbs[-1] < 0
    limbs = torch.where(negative, -limbs, limbs)  # [10, C]
    _carry(limbs)
    limbs, fraction = _quotient(limbs, divide_by)
    bits = torch.where(limbs[-1] != 0, form.infinity, _round_limbs(limbs[:-1], fraction, form))
    nan, positive, negative_infinity = (count > 0 for count in state[LIMBS:])
    bits = torch.where(positive | negative_infinity, form.infinity, bits)
    negative = torch.where(positive | negative_infinity, negative_infinity, negative)
    bits = torch.where(negative, bits + form.sign, bits)
    bits = torch.where(nan | (positive & negative_infinity), form.nan, bits)
    return bits.to(form.storage).view(dtype)


def split(c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 as m * 2^(p - 149): int64 m < 2^24 in magnitude, and p, 254 for Inf and NaN."""
    bits = c.view(torch.int32)
    exponent = (bits >> 23) & 255
    fraction = bits & 0x7FFFFF
    m = torch.where(exponent == 0, fraction, fraction | 0x800000).long()
    return torch.where(bits < 0, -m, m), exponent.clamp(min=1) - 1


def _add_slice(state: torch.Tensor, c: torch.Tensor) -> None:
    """Add the pieces of c [R, C] to the limbs; each value adds at most one piece to a limb."""
    m, p = split(c)
    special = p == 254
    _count_special(state, c, special)
    m.masked_fill_(special, 0)
    shifted = m.abs() << (p & 31)
    sign = m.sign()
    limb = (p >> 5).long()
    limbs = state[:LIMBS]
    limbs.scatter_add_(0, limb, (shifted & DIGIT) * sign)
    limbs.scatter_add_(0, limb + 1, (shifted >> LIMB_BITS) * sign)


def _count_special(state: torch.Tensor, c: torch.Tensor, special: torch.Tensor) -> None:
    bits = c.view(torch.int32)
    nan = special & (bits & 0x7FFFFF != 0)
    state[NAN_COUNT] += nan.sum(0)
    state[POSITIVE_INFINITIES] += (special & ~nan & (bits > 0)).sum(0)
    state[NEGATIVE_INFINITIES] += (special & ~nan & (bits < 0)).sum(0)


def _carry(limbs: torch.Tensor) -> None:
    for k in range(LIMBS - 1):
        limbs[k + 1] += limbs[k] >> LIMB_BITS
        limbs[k] &= DIGIT


def _quotient(limbs: torch.Tensor, divide_by: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Non-negative normalised limbs divided, and the limb [1, C] below them.

    The lowest bit of that limb is also set if anything remains below it: rounding only asks
    whether that is so.
    """
    if divide_by == 1:
        return limbs, torch.zeros_like(limbs[:1])
    digits, rest = [limbs[-1] // divide_by], limbs[-1] % divide_by
    for limb in (*limbs[:-1].flip(0), torch.zeros_like(rest)):
        digit = torch.zeros_like(rest)
        # Half a limb at a time: a rest below 2^47 and 16 bits fit into an int64.
        for half in (limb >> 16, limb & 0xFFFF):
            rest = rest << 16 | half
            digit = digit << 16 | rest // divide_by
            rest = rest % divide_by
        digits.append(digit)
    fraction = digits.pop() | (rest != 0).long()
    return torch.stack(digits[::-1]), fraction[None]


def _round_limbs(limbs: torch.Tensor, fraction: torch.Tensor, form: Format) -> torch.Tensor:
    """The pattern of a non-negative sum of normalised limbs; overflow gives infinity."""
    index = torch.arange(len(limbs), device=limbs.device)[:, None]
    top = torch.where(limbs != 0, index, 0).amax(0, keepdim=True)  # [1, C]
    # FP64 holds a digit exactly; frexp's exponent is its bit length.
    length = torch.frexp(limbs.gather(0, top).double()).exponent
    lowest = (LIMB_BITS * top + length - form.precision).clamp(min=form.lowest_bit)

    # A limb on either side: the bit below `lowest`, and two limbs, always exist.
    padded = torch.cat([fraction, limbs, torch.zeros_like(fraction)])
    half = lowest + LIMB_BITS - 1
    limb, offset = half >> 5, half & 31
    pair = padded.gather(0, limb) | padded.gather(0, limb + 1) << LIMB_BITS
    index = torch.arange(len(padded), device=limbs.device)[:, None]
    below = ((padded != 0) & (index < limb)).any(0) | (pair & ((1 << offset) - 1) != 0)
    kept = pair >> offset + 1
    up = (pair >> offset & 1).bool() & (below | (kept & 1).bool())
    # The leading bit of `kept` adds one to the exponent field, as does a carry out of it.
    bits = (lowest - form.lowest_bit << form.precision - 1) + kept + up
    return bits.clamp(max=form.infinity)[0]
