# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding in Triton: one or two tensors a launch, same bits as golden.

check_ptx: forbid fma (the rounding that fuses has its kernel in a file of its own)
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from rlk.launch import launch_triton

from .device_triton import COUNTS, HEADS, PAIRS, TOKENS, turn_heads
from .kernel_triton_complex_eager import rope_complex_eager


@triton.jit(do_not_specialize=COUNTS)
def rope_separate(
    x, y, x_b, x_s, x_h, x_d, heads, other, other_y, o_b, o_s, o_h, o_d, other_heads,
    cos, sin, cos_b, cos_s, cos_p, sin_b, sin_s, sin_p, tokens, seq, columns, pairs,
    INVERSE: tl.constexpr, INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    if tl.program_id(1) == 0:
        turn_heads(
            x, y, x_b, x_s, x_h, x_d, heads, cos, sin, cos_b, cos_s, cos_p, sin_b, sin_s, sin_p,
            tokens, seq, columns, pairs, False, INVERSE, INTERLEAVED, TOKENS, HEADS, PAIRS,
        )  # fmt: skip
    else:
        turn_heads(
            other, other_y, o_b, o_s, o_h, o_d, other_heads,
            cos, sin, cos_b, cos_s, cos_p, sin_b, sin_s, sin_p,
            tokens, seq, columns, pairs, False, INVERSE, INTERLEAVED, TOKENS, HEADS, PAIRS,
        )  # fmt: skip


def strides(tensor: torch.Tensor) -> list[int]:
    """Its strides, 0 along axes of one element: no kernel is compiled for what they hold."""
    *outer, last = zip(tensor.shape, tensor.stride(), strict=True)
    return [0 if size == 1 else stride for size, stride in outer] + [last[1]]


def turn(
    tensors: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    rounding: str,
    inverse: bool,
) -> tuple[torch.Tensor, ...]:
    """One or two tensors [B, S, H, D] turned in one launch, or turned back if `inverse`."""
    results = tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors)
    batch, seq, _, columns = tensors[0].shape
    parts = []
    for x, y in ((tensors[0], results[0]), (tensors[-1], results[-1])):
        parts += [x, y, *strides(x), x.shape[2]]
    kernel = rope_complex_eager if rounding == "complex_eager" else rope_separate
    launch_triton(
        kernel, (triton.cdiv(batch * seq, TOKENS), len(tensors)),
        *parts, cos, sin, *strides(cos), *strides(sin), batch * seq, seq, columns, cos.shape[-1],
        INVERSE=inverse, INTERLEAVED=interleaved, TOKENS=TOKENS, HEADS=HEADS, PAIRS=PAIRS,
    )  # fmt: skip
    return results


def forward(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool, rounding: str
) -> tuple[torch.Tensor, ...]:
    """(y [B, S, H, D],)"""
    return turn((x,), cos, sin, interleaved, rounding, inverse=False)


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool,
    rounding: str,
    needs: frozenset[str],
) -> tuple[torch.Tensor | None, ...]:
    """(dx [B, S, H, D],)"""
    return turn((dy,), cos, sin, interleaved, rounding, inverse=True) if needs else (None,)
