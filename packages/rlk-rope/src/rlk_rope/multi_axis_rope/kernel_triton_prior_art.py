# SPDX-License-Identifier: Apache-2.0
"""The schedule of flash-attention's Triton rotary embedding, written anew, for benchmark and tests.

Of it are: the tile (two heads, eight tokens, all columns that are turned, at 4 warps), one program
for each, heads first in the grid; tables shared by all samples; neighbours loaded together;
backward with the sine negated; other columns copied by PyTorch. No operator uses this kernel.
"""

from typing import Any

import torch
import triton
import triton.language as tl

HEADS = 2
# Fewer tokens where a row has more than this many columns to turn.
TOKENS, TOKENS_OF_WIDE, WIDE = 8, 4, 128


@triton.jit
def rotary_by_tiles(
    x, y, cos, sin, seq, heads, x_b, x_s, x_h, x_d, y_b, y_s, y_h, y_d,
    INVERSE: tl.constexpr, INTERLEAVED: tl.constexpr, TURNED: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)[:, None, None]
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[None, :, None]
    sample = tl.program_id(2)
    pair = tl.arange(0, WIDTH)[None, None, :]
    known = (token < seq) & (pair < TURNED)
    c = tl.load(cos + token * TURNED + pair, mask=known, other=1.0).to(tl.float32)
    s = tl.load(sin + token * TURNED + pair, mask=known, other=0.0).to(tl.float32)
    if INVERSE:
        s = -s
    inside = (token < seq) & (head < heads)
    x += sample * x_b + head * x_h + token * x_s
    y += sample * y_b + head * y_h + token * y_s
    if INTERLEAVED:
        column = tl.arange(0, 2 * WIDTH)[None, None, :]
        inside = inside & (column < 2 * TURNED)
        both = tl.load(x + column * x_d, mask=inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (HEADS, TOKENS, WIDTH, 2)))
        turned = tl.join(first * c - second * s, first * s + second * c)
        tl.store(y + column * y_d, tl.reshape(turned, (HEADS, TOKENS, 2 * WIDTH)), mask=inside)
    else:
        inside = inside & (pair < TURNED)
        first = tl.load(x + pair * x_d, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x + (pair + TURNED) * x_d, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + pair * y_d, first * c - second * s, mask=inside)
        tl.store(y + (pair + TURNED) * y_d, first * s + second * c, mask=inside)


def turn(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    contraction: bool,
    inverse: bool,
) -> torch.Tensor:
    """x [B, S, H, D] turned by tables [S, P], or turned back if `inverse`."""
    batch, seq, heads, columns = x.shape
    pairs = cos.shape[-1]
    y = torch.empty_like(x)
    if 2 * pairs < columns:
        y[..., 2 * pairs :].copy_(x[..., 2 * pairs :])
    tokens = TOKENS_OF_WIDE if 2 * pairs > WIDE else TOKENS
    grid = (triton.cdiv(heads, HEADS), triton.cdiv(seq, tokens), batch)
    with torch.cuda.device_of(x):
        rotary_by_tiles[grid](
            x, y, cos.contiguous(), sin.contiguous(), seq, heads, *x.stride(), *y.stride(),
            INVERSE=inverse, INTERLEAVED=interleaved, TURNED=pairs,
            WIDTH=triton.next_power_of_2(pairs), TOKENS=tokens, HEADS=HEADS,
            enable_fp_fusion=contraction,
        )  # fmt: skip
    return y


class Rotary(torch.autograd.Function):
    """x, cos, sin, interleaved, contraction -> y; a gradient for x alone."""

    @staticmethod
    def forward(ctx: Any, x: Any, cos: Any, sin: Any, interleaved: bool, contraction: bool) -> Any:
        """y"""
        ctx.save_for_backward(cos, sin)
        ctx.options = interleaved, contraction
        return turn(x, cos, sin, interleaved, contraction, inverse=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """dx"""
        (dy,), (cos, sin) = gradients, ctx.saved_tensors
        dx = turn(dy, cos, sin, *ctx.options, inverse=True)
        return dx, None, None, None, None
