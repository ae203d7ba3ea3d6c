# SPDX-License-Identifier: Apache-2.0
"""The rotation that fuses one product of each sum, as complex products on a GPU do."""

import triton
import triton.language as tl

from .device_triton import COUNTS, turn_heads


@triton.jit(do_not_specialize=COUNTS)
def rope_complex_eager(
    x, y, x_b, x_s, x_h, x_d, heads, other, other_y, o_b, o_s, o_h, o_d, other_heads,
    cos, sin, cos_b, cos_s, cos_p, sin_b, sin_s, sin_p, tokens, seq, columns, pairs,
    INVERSE: tl.constexpr, INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    if tl.program_id(1) == 0:
        turn_heads(
            x, y, x_b, x_s, x_h, x_d, heads, cos, sin, cos_b, cos_s, cos_p, sin_b, sin_s, sin_p,
            tokens, seq, columns, pairs, True, INVERSE, INTERLEAVED, TOKENS, HEADS, PAIRS,
        )  # fmt: skip
    else:
        turn_heads(
            other, other_y, o_b, o_s, o_h, o_d, other_heads,
            cos, sin, cos_b, cos_s, cos_p, sin_b, sin_s, sin_p,
            tokens, seq, columns, pairs, True, INVERSE, INTERLEAVED, TOKENS, HEADS, PAIRS,
        )  # fmt: skip
