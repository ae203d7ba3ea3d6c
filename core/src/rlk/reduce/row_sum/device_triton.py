# SPDX-License-Identifier: Apache-2.0
"""Sums of one chunk of 256 terms for each of R rows, in the order of `golden`.

A caller loops over chunks at run time: terms past N are loaded as 0, chunks are added in
ascending order to an accumulator that starts from +0, and +0 is added at the end.

A lane's eight terms are two halves of four, as a thread holds four FP32 values of one load. Both
halves are folded twice, the second time from where the first half ended; a compiler drops what is
not picked afterwards.
"""

import triton
import triton.language as tl


@triton.jit
def chunk_sum(terms):
    """Sum of each row of a chunk: [R, 256] FP32 -> [R]."""
    halves = tl.reshape(terms, (terms.shape[0], 32, 2, 4))
    start = tl.zeros((terms.shape[0], 32, 2), tl.float32)
    first = _pick(_fold(halves, start), 0)  # [R, 32]
    start = tl.broadcast_to(first[:, :, None], (terms.shape[0], 32, 2))
    return _tree(_pick(_fold(halves, start), 1))


@triton.jit
def chunk_dot(a, b):
    """Dot product of each pair of rows of a chunk: [R, 256] FP32 twice -> [R]."""
    left = tl.reshape(a, (a.shape[0], 32, 2, 4))
    right = tl.reshape(b, (a.shape[0], 32, 2, 4))
    start = tl.zeros((a.shape[0], 32, 2), tl.float32)
    first = _pick(_fold_dot(left, right, start), 0)  # [R, 32]
    start = tl.broadcast_to(first[:, :, None], (a.shape[0], 32, 2))
    return _tree(_pick(_fold_dot(left, right, start), 1))


@triton.jit
def _fold(halves, total):
    """Add four terms left to right to `total`: [R, 32, 2, 4] -> [R, 32, 2]."""
    # ORDER: fold along the terms of a lane.
    for place in tl.static_range(4):
        total = total + _pick(halves, place)
    return total


@triton.jit
def _fold_dot(left, right, total):
    """As `_fold`, with fma as the step."""
    # ORDER: fold along the terms of a lane.
    for place in tl.static_range(4):
        total = tl.fma(_pick(left, place), _pick(right, place), total)
    return total


@triton.jit
def _pick(values, place: tl.constexpr):
    """The element at `place` of the last axis, by an integer sum whose other summands are 0."""
    places = tl.arange(0, values.shape[-1])
    bits = values.to(tl.int32, bitcast=True)
    return tl.sum(tl.where(places == place, bits, 0), -1).to(tl.float32, bitcast=True)


@triton.jit
def _tree(lanes):
    """Sum of 32 lanes: [R, 32] -> [R]."""
    # ORDER: tree along lanes, adjacent pairs; each `tl.sum` is one addition.
    for level in tl.static_range(5):
        lanes = tl.sum(tl.reshape(lanes, (lanes.shape[0], 16 >> level, 2)), 2)
    return tl.reshape(lanes, (lanes.shape[0],))
