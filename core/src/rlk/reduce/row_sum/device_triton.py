# SPDX-License-Identifier: Apache-2.0
"""Sums of R rows, one chunk of 256 terms at a time or whole, in the order of `golden`.

A caller that loops over chunks loads terms past N as 0, adds chunks in ascending order to an
accumulator that starts from +0, and adds +0 at the end; `row_sum` and `row_dot` do so themselves.

A lane's eight terms are two halves of four, as a thread holds four FP32 values of one load. Both
halves are folded twice, the second time from where the first half ended; a compiler drops what is
not picked afterwards.
"""

import triton
import triton.language as tl

CHUNK = tl.constexpr(256)


@triton.jit
def chunk_sum(terms):
    """Sum of each row of chunks of 256 or fewer: [R, W] FP32 -> [R], W a power of two from 8 on."""
    halves = tl.reshape(terms, (terms.shape[0], terms.shape[1] // 8, 2, 4))
    start = tl.zeros((terms.shape[0], terms.shape[1] // 8, 2), tl.float32)
    first = _pick(_fold(halves, start), 0)  # [R, W / 8]
    start = tl.broadcast_to(first[:, :, None], start.shape)
    return _tree(_pick(_fold(halves, start), 1))


@triton.jit
def chunk_dot(a, b):
    """Dot product of each pair of rows of a chunk: [R, W] FP32 twice -> [R]."""
    left = tl.reshape(a, (a.shape[0], a.shape[1] // 8, 2, 4))
    right = tl.reshape(b, (a.shape[0], a.shape[1] // 8, 2, 4))
    start = tl.zeros((a.shape[0], a.shape[1] // 8, 2), tl.float32)
    first = _pick(_fold_dot(left, right, start), 0)  # [R, W / 8]
    start = tl.broadcast_to(first[:, :, None], start.shape)
    return _tree(_pick(_fold_dot(left, right, start), 1))


@triton.jit
def row_sum(terms):
    """Sum of each whole row: [R, W] FP32 -> [R], W a power of two from 8 on."""
    if terms.shape[1] <= CHUNK:
        chunks = chunk_sum(terms)[:, None]
    else:
        shape: tl.constexpr = (terms.shape[0] * terms.shape[1] // CHUNK, CHUNK)
        sums = chunk_sum(tl.reshape(terms, shape))
        chunks = tl.reshape(sums, (terms.shape[0], terms.shape[1] // CHUNK))
    # ORDER: chunks ascending along N, from +0.
    return _fold_chunks(tl.zeros((terms.shape[0], 1), tl.float32), chunks)


@triton.jit
def row_dot(a, b):
    """Dot product of each pair of whole rows: [R, W] FP32 twice -> [R]."""
    if a.shape[1] <= CHUNK:
        chunks = chunk_dot(a, b)[:, None]
    else:
        shape: tl.constexpr = (a.shape[0] * a.shape[1] // CHUNK, CHUNK)
        sums = chunk_dot(tl.reshape(a, shape), tl.reshape(b, shape))
        chunks = tl.reshape(sums, (a.shape[0], a.shape[1] // CHUNK))
    # ORDER: chunks ascending along N, from +0.
    return _fold_chunks(tl.zeros((a.shape[0], 1), tl.float32), chunks)


@triton.jit
def _fold_chunks(total, chunks):
    """total + the sums of a row's chunks, left to right: [R, 1] and [R, K] -> [R].

    Lower and upper halves are split again and again, which a thread does once it holds them all.
    """
    if chunks.shape[1] == 1:
        result = tl.reshape(total + chunks, (chunks.shape[0],))
    else:
        halves = tl.reshape(chunks, (chunks.shape[0], 2, chunks.shape[1] // 2))
        lower, upper = tl.split(tl.permute(halves, (0, 2, 1)))
        result = _fold_chunks(_fold_chunks(total, lower)[:, None], upper)
    return result


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
    """Sum of 32 lanes, or of the first ones where the others hold nothing: [R, L] -> [R]."""
    # ORDER: tree along lanes, adjacent pairs; each `tl.sum` is one addition.
    for _ in tl.static_range(5):
        if lanes.shape[1] > 1:
            lanes = tl.sum(tl.reshape(lanes, (lanes.shape[0], lanes.shape[1] // 2, 2)), 2)
    return tl.reshape(lanes, (lanes.shape[0],))
