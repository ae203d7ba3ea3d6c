# SPDX-License-Identifier: Apache-2.0
"""What both roundings share in Triton: tiles of tokens, heads and columns, in and out."""

import triton
import triton.language as tl

from rlk.math.device_triton import negate

# Tokens and heads of a tile, and its pairs of columns: 32 elements for each of 128 threads. Any
# constants give the same bits.
TOKENS = 4
HEADS = 8
PAIRS = 64
# Arguments whose values do not decide how memory is read: one kernel serves all of them.
COUNTS = ("heads", "other_heads", "tokens", "seq")


@triton.jit
def table_tile(table, token, seq, stride_b, stride_s, stride_p, column, mask):
    """[TOKENS, 1, PAIRS] of a table; `token` [TOKENS, 1, 1] counts through all samples."""
    at = (token // seq) * stride_b + (token % seq) * stride_s + column * stride_p
    return tl.load(table + at, mask=mask, other=0.0)


@triton.jit
def load_pairs(x, at, stride_d, start, pairs, mask, INTERLEAVED: tl.constexpr,
               TOKENS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr):  # fmt: skip
    """First and second columns [TOKENS, HEADS, PAIRS] in FP32, from pair `start` on."""
    if INTERLEAVED:
        # Neighbours lie in one tile, so that memory is read in its order.
        column = 2 * start + tl.arange(0, 2 * PAIRS)[None, None, :].to(tl.int64)
        both = tl.load(x + at + column * stride_d, mask=mask & (column < 2 * pairs), other=0.0)
        first, second = tl.split(tl.reshape(both, (TOKENS, HEADS, PAIRS, 2)))
    else:
        column = start + tl.arange(0, PAIRS)[None, None, :].to(tl.int64)
        inside = mask & (column < pairs)
        first = tl.load(x + at + column * stride_d, mask=inside, other=0.0)
        second = tl.load(x + at + (column + pairs) * stride_d, mask=inside, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def store_pairs(y, at, first, second, start, pairs, mask, INTERLEAVED: tl.constexpr,
                TOKENS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr):  # fmt: skip
    """Columns rounded once to the dtype of y, which is contiguous."""
    if INTERLEAVED:
        column = 2 * start + tl.arange(0, 2 * PAIRS)[None, None, :].to(tl.int64)
        both = tl.reshape(tl.join(first, second), (TOKENS, HEADS, 2 * PAIRS))
        tl.store(y + at + column, both.to(y.dtype.element_ty), mask=mask & (column < 2 * pairs))
    else:
        column = start + tl.arange(0, PAIRS)[None, None, :].to(tl.int64)
        inside = mask & (column < pairs)
        tl.store(y + at + column, first.to(y.dtype.element_ty), mask=inside)
        tl.store(y + at + (column + pairs), second.to(y.dtype.element_ty), mask=inside)


@triton.jit
def copy_rest(x, y, at, at_y, stride_d, columns, pairs, mask, WIDTH: tl.constexpr):
    """Columns behind the pairs, as they are."""
    for start in range(2 * pairs, columns, WIDTH):
        column = start + tl.arange(0, WIDTH)[None, None, :].to(tl.int64)
        inside = mask & (column < columns)
        values = tl.load(x + at + column * stride_d, mask=inside)
        tl.store(y + at_y + column, values, mask=inside)


@triton.jit
def rotate(first, second, c, s, COMPLEX_EAGER: tl.constexpr, INVERSE: tl.constexpr):
    """Each product rounded and then their sum, or the second rounded and the first fused with it.

    Nothing is negated where a sum can become a difference.
    """
    if COMPLEX_EAGER:
        if INVERSE:
            turned = tl.fma(first, c, second * s), tl.fma(first, negate(s), second * c)
        else:
            turned = tl.fma(first, c, negate(second * s)), tl.fma(first, s, second * c)
    elif INVERSE:
        turned = first * c + second * s, second * c - first * s
    else:
        turned = first * c - second * s, first * s + second * c
    return turned


@triton.jit
def turn_heads(
    x, y, x_b, x_s, x_h, x_d, heads, cos, sin, cos_b, cos_s, cos_p, sin_b, sin_s, sin_p,
    tokens, seq, columns, pairs,
    COMPLEX_EAGER: tl.constexpr, INVERSE: tl.constexpr, INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """All heads of this program's tokens; tables are read once for all of them."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    row = (token // seq) * x_b + (token % seq) * x_s
    pair = tl.arange(0, PAIRS)[None, None, :].to(tl.int64)
    for start in range(0, pairs, PAIRS):
        inside = (token < tokens) & (start + pair < pairs)
        c = table_tile(cos, token, seq, cos_b, cos_s, cos_p, start + pair, inside)
        s = table_tile(sin, token, seq, sin_b, sin_s, sin_p, start + pair, inside)
        for head_start in range(0, heads, HEADS):
            head = head_start + tl.arange(0, HEADS)[None, :, None].to(tl.int64)
            mask = (token < tokens) & (head < heads)
            first, second = load_pairs(x, row + head * x_h, x_d, start, pairs, mask,
                                       INTERLEAVED, TOKENS, HEADS, PAIRS)  # fmt: skip
            first, second = rotate(first, second, c, s, COMPLEX_EAGER, INVERSE)
            store_pairs(y, (token * heads + head) * columns, first, second, start, pairs, mask,
                        INTERLEAVED, TOKENS, HEADS, PAIRS)  # fmt: skip
    for head_start in range(0, heads, HEADS):
        head = head_start + tl.arange(0, HEADS)[None, :, None].to(tl.int64)
        mask = (token < tokens) & (head < heads)
        copy_rest(x, y, row + head * x_h, (token * heads + head) * columns, x_d, columns, pairs,
                  mask, 2 * PAIRS)  # fmt: skip
