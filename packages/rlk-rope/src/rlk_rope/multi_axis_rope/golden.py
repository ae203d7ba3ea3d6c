# SPDX-License-Identifier: Apache-2.0
"""Which bits are right: FP32 in the written order, each operation rounded once."""

import torch

from rlk.launch import start_golden
from rlk.math.golden import fma, negate


def forward(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool, rounding: str
) -> tuple[torch.Tensor]:
    """(y [B, S, H, D],)"""
    start_golden("multi_axis_rope_forward", __file__)
    return (rotate(x, cos, sin, interleaved, rounding, inverse=False),)


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool,
    rounding: str,
    needs: frozenset[str],
) -> tuple[torch.Tensor | None]:
    """(dx [B, S, H, D],)"""
    start_golden("multi_axis_rope_backward", __file__)
    return (rotate(dy, cos, sin, interleaved, rounding, inverse=True) if needs else None,)


def rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    rounding: str,
    inverse: bool,
) -> torch.Tensor:
    """x [B, S, H, D] turned, or turned back if `inverse`; columns beyond the pairs are copied."""
    pairs = cos.shape[-1]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    y[..., 2 * pairs :] = x[..., 2 * pairs :]
    first, second = (t.float() for t in halves(x, pairs, interleaved))
    c, s = (t[:, :, None].expand_as(first) for t in (cos, sin))
    turn = complex_eager if rounding == "complex_eager" else separate
    results = turn(first, second, c, s, inverse)
    for place, result in zip(halves(y, pairs, interleaved), results, strict=True):
        place.copy_(result)
    return y


def halves(x: torch.Tensor, pairs: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and the second column of each pair."""
    if interleaved:
        return x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    return x[..., :pairs], x[..., pairs : 2 * pairs]


def separate(
    first: torch.Tensor, second: torch.Tensor, c: torch.Tensor, s: torch.Tensor, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each product rounded, then their sum."""
    if inverse:
        return first * c + second * s, second * c - first * s
    return first * c - second * s, first * s + second * c


def complex_eager(
    first: torch.Tensor, second: torch.Tensor, c: torch.Tensor, s: torch.Tensor, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The second product rounded, the first fused with it."""
    if inverse:
        return fma(first, c, second * s), fma(first, negate(s), second * c)
    return fma(first, c, negate(second * s)), fma(first, s, second * c)
