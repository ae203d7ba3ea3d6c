// SPDX-License-Identifier: Apache-2.0
// The second pass of a column sum: the first levels of all blocks into the integer state.
#pragma once
#include "rlk/reduce/exact_sum/device_cuda.cuh"

namespace rlk {

// 8: columns of a block, whose doubles share 64-byte pieces of a partial's row; 128 threads for
// each column, as time here is the latency of a few loads.
constexpr int COMBINE_COLUMNS = 8;
constexpr int COMBINE_THREADS = 1024;

// The 32 bits that `value`, a multiple of 2^-149, has in a limb, with its sign.
__device__ __forceinline__ long long limb_of(double value, int limb) {
    const unsigned long long bits = (unsigned long long)__double_as_longlong(value);
    const int exponent = (int)(bits >> 52) & 2047;
    const unsigned long long mantissa =
        exponent == 0 ? 0 : (bits & ((1ull << 52) - 1)) | (1ull << 52);
    // 926 = 1075 - 149: value = mantissa * 2^(exponent - 926) in units of 2^-149
    const int shift = 32 * limb - (exponent - 926);
    unsigned long long piece = 0;
    if (shift >= 0 && shift < 64) piece = mantissa >> shift;
    if (shift < 0 && shift > -32) piece = mantissa << -shift;
    const long long digit = (long long)(piece & 0xffffffffull);
    return (long long)bits < 0 ? -digit : digit;
}

// Sums over the lanes of a warp that have the same column.
__device__ __forceinline__ long long sum_of_column(long long value) {
#pragma unroll
    for (int distance = 16; distance >= COMBINE_COLUMNS; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

// The state holds what was deeper than the partials, or zeros.
static __global__ void __launch_bounds__(COMBINE_THREADS)
    combine_partials(Partials partials, int blocks, ExactState state) {
    constexpr int WARPS = COMBINE_THREADS / 32;
    __shared__ long long sums[LIMBS][WARPS][COMBINE_COLUMNS];
    __shared__ long long totals[LIMBS][COMBINE_COLUMNS];
    const int place = threadIdx.x % COMBINE_COLUMNS;
    const long long first = (long long)blockIdx.x * COMBINE_COLUMNS, column = first + place;
    long long sum[LIMBS] = {0};
    for (int block = threadIdx.x / COMBINE_COLUMNS; block < blocks && column < state.columns;
         block += COMBINE_THREADS / COMBINE_COLUMNS) {
        const int levels = partials.flag(block, column) ? PARTIAL_LEVELS : 1;
        for (int d = 0; d < levels; ++d) {
            const double value = partials.at(block, d, column);
            if (value == 0.0) continue;
#pragma unroll
            for (int i = 0; i < LIMBS; ++i) sum[i] += limb_of(value, i);
        }
    }
#pragma unroll
    for (int i = 0; i < LIMBS; ++i) {
        const long long total = sum_of_column(sum[i]);
        if (threadIdx.x % 32 == place) sums[i][threadIdx.x / 32][place] = total;
    }
    __syncthreads();
    const int limb = threadIdx.x / COMBINE_COLUMNS;
    if (limb < LIMBS && column < state.columns) {
        long long total = state.data[limb * state.columns + column];
        for (int warp = 0; warp < WARPS; ++warp) total += sums[limb][warp][place];
        totals[limb][place] = total;
    }
    __syncthreads();
    if (limb > 0 || column >= state.columns) return;
#pragma unroll
    for (int i = 0; i < LIMBS; ++i) sum[i] = totals[i][place];
    normalise_limbs(sum);
#pragma unroll
    for (int i = 0; i < LIMBS; ++i) state.data[i * state.columns + column] = sum[i];
}

// Combine into a state that the first pass has zeroed and may have added to.
inline cudaError_t launch_combine(Partials partials, int blocks, ExactState state,
                                  cudaStream_t stream) {
    const int grid = (int)((state.columns + COMBINE_COLUMNS - 1) / COMBINE_COLUMNS);
    combine_partials<<<grid, COMBINE_THREADS, 0, stream>>>(partials, blocks, state);
    return cudaGetLastError();
}

}  // namespace rlk
