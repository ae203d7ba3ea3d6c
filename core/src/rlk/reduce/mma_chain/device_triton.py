# SPDX-License-Identifier: Apache-2.0
"""Steps of the MMA chain in Triton, under the names of device_cuda.cuh."""

import triton
import triton.language as tl


@triton.jit
def round_tf32(bits):
    """The bits of a finite FP32 number, its fraction to nearest even in 10 bits."""
    return ((bits + 0xFFF + ((bits >> 13) & 1)) >> 13) << 13


@triton.jit
def split_tf32(x):
    """FP32 as hi + lo, both TF32 numbers; Inf and NaN stand in lo alone."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    special = size >= 0x7F800000
    # The largest TF32 number instead of Inf.
    hi = tl.minimum(round_tf32(size), 0x7F7FE000) | (bits ^ size)
    hi = tl.where(special, 0, hi).to(tl.float32, bitcast=True)
    lo = round_tf32((x - hi).to(tl.int32, bitcast=True))  # the difference is exact
    # The low bits of a NaN are not read by the tensor core: its high ones must say NaN.
    lo = tl.where(special, tl.where(size > 0x7F800000, 0x7FC00000, bits), lo)
    return hi, lo.to(tl.float32, bitcast=True)


@triton.jit
def apart(acc):
    """An accumulator as numbers to add to: else Triton may fold an addition into its MMA."""
    bits = acc.to(tl.int32, bitcast=True)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def mma_block(a, b, acc, SWAPPED: tl.constexpr):
    """The chain `acc` continued over one block of K: a [BM, BK], b [BK, BN].

    SWAPPED: a and b are those of mma_chain.product in the other order.
    """
    if a.dtype == tl.float32:
        # ORDER: within 32 of K all lo * hi, then all hi * lo, then all hi * hi; then one addition.
        tl.static_assert(a.shape[1] == 32)
        a_hi, a_lo = split_tf32(a)
        b_hi, b_lo = split_tf32(b)
        block = tl.zeros(acc.shape, tl.float32)
        if SWAPPED:
            block = tl.dot(a_hi, b_lo, block, input_precision="tf32")
            block = tl.dot(a_lo, b_hi, block, input_precision="tf32")
        else:
            block = tl.dot(a_lo, b_hi, block, input_precision="tf32")
            block = tl.dot(a_hi, b_lo, block, input_precision="tf32")
        block = tl.dot(a_hi, b_hi, block, input_precision="tf32")
        return acc + apart(block)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def finish(acc):
    """The chain after its last step: idle steps of zeros change at most the sign of a zero."""
    return apart(acc) + 0.0


@triton.jit
def tile_place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a tile: groups of rows go through the columns together, for the L2."""
    per_group = GROUP * tiles_n
    group = tile // per_group
    first = group * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    rest = tile % per_group
    return first + rest % height, rest // height
