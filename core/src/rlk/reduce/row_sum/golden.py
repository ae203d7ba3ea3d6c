# SPDX-License-Identifier: Apache-2.0
"""Row sums in PyTorch, in the chunk-256 order.

    lane(c, l)  = ((((+0 + t[256c + 8l]) + t[256c + 8l + 1]) + ...) + t[256c + 8l + 7])
    chunk(c)    = balanced tree over l = 0 .. 31 of adjacent pairs
    row_sum     = (((+0 + chunk(0)) + chunk(1)) + ...) + +0

The terms t are padded with zeros to whole chunks. `row_dot` has fma(a, b, lane) as the lane step.
"""

import torch

from rlk.math.golden import fma

LANES = 32  # threads of a warp
LANE_TERMS = 8  # BF16 values of one 16-byte load
CHUNK = LANES * LANE_TERMS


def row_sum(terms: torch.Tensor) -> torch.Tensor:
    """Sum of each row, FP32.

    Args:
        terms: [R, N], FP32, any strides. Products belong here already multiplied.
    Returns:
        [R].
    Order: chunk-256 along N; depends on N alone.
    """
    lanes = _lanes(terms)  # [8, R, chunks, 32]
    total = torch.zeros_like(lanes[0])
    for term in lanes:
        total = total + term
    return _combine(total)


def row_dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Dot product of each pair of rows, FP32, one rounding for each term.

    Args:
        a: [R, N], FP32, any strides.
        b: as a; the same tensor gives the sum of squares.
    Returns:
        [R].
    Order: chunk-256 along N; depends on N alone.
    """
    total = torch.zeros_like(_lanes(a)[0])
    for left, right in zip(_lanes(a), _lanes(b), strict=True):
        total = fma(left, right, total)
    return _combine(total)


def _lanes(terms: torch.Tensor) -> torch.Tensor:
    """Terms by their place in a lane: [8, R, chunks, 32], padded with +0."""
    rows, length = terms.shape
    chunks = -(-length // CHUNK)
    padded = torch.nn.functional.pad(terms, (0, chunks * CHUNK - length))
    return padded.reshape(rows, chunks, LANES, LANE_TERMS).movedim(-1, 0)


def _combine(lanes: torch.Tensor) -> torch.Tensor:
    """Lane sums [R, chunks, 32] to row sums [R]."""
    while lanes.shape[-1] > 1:
        # ORDER: tree along lanes, adjacent pairs.
        lanes = lanes[..., 0::2] + lanes[..., 1::2]
    chunks = lanes.squeeze(-1)  # [R, chunks]
    total = torch.zeros_like(chunks[:, 0])
    for chunk in chunks.unbind(1):
        # ORDER: fold along chunks, ascending.
        total = total + chunk
    return total + 0.0
