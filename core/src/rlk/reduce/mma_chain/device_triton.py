# SPDX-License-Identifier: Apache-2.0
"""Steps of the MMA chain in Triton, under the names of device_cuda.cuh."""

import triton
import triton.language as tl


@triton.jit
def round_tf32(size):
    """The magnitude bits of a finite FP32 number, to nearest even in 10 bits, kept finite."""
    rounded = (size + 0xFFF + ((size >> 13) & 1)) & 0x7FFFE000
    return tl.minimum(rounded, 0x7F7FE000)


@triton.jit
def split_tf32(x):
    """FP32 as hi + lo, both TF32 numbers; Inf and NaN stand in lo alone."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    special = size >= 0x7F800000
    hi = (round_tf32(size) | (bits ^ size)).to(tl.float32, bitcast=True)
    hi = tl.where(special, 0.0, hi)
    rest = (x - hi).to(tl.int32, bitcast=True)  # exact
    rest_size = rest & 0x7FFFFFFF
    lo = round_tf32(rest_size) | (rest ^ rest_size)
    # The low bits of a NaN are not read by the tensor core: its high ones must say NaN.
    lo = tl.where(special, tl.where(size > 0x7F800000, 0x7FC00000, bits), lo)
    return hi, lo.to(tl.float32, bitcast=True)


@triton.jit
def mma_block(a, b, acc, SWAPPED: tl.constexpr):
    """The chain `acc` continued over one block of K: a [BM, BK], b [BK, BN].

    SWAPPED: a and b are those of mma_chain.product in the other order.
    """
    if a.dtype == tl.float32:
        # ORDER: within 32 of K all lo * hi, then all hi * lo, then all hi * hi.
        tl.static_assert(a.shape[1] == 32)
        a_hi, a_lo = split_tf32(a)
        b_hi, b_lo = split_tf32(b)
        if SWAPPED:
            acc = tl.dot(a_hi, b_lo, acc, input_precision="tf32")
            acc = tl.dot(a_lo, b_hi, acc, input_precision="tf32")
        else:
            acc = tl.dot(a_lo, b_hi, acc, input_precision="tf32")
            acc = tl.dot(a_hi, b_lo, acc, input_precision="tf32")
        return tl.dot(a_hi, b_hi, acc, input_precision="tf32")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def finish(acc):
    """The chain after its last step: idle steps of zeros change at most the sign of a zero."""
    # Through integers: Triton would fold an addition into the MMA's accumulator.
    bits = acc.to(tl.int32, bitcast=True)
    return bits.to(tl.float32, bitcast=True) + 0.0


@triton.jit
def tile_place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a tile: groups of rows go through the columns together, for the L2."""
    per_group = GROUP * tiles_n
    group = tile // per_group
    first = group * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    rest = tile % per_group
    return first + rest % height, rest // height
