// SPDX-License-Identifier: Apache-2.0
// The second pass of a column sum: the first levels of all blocks into the integer state.
#pragma once
#include "rlk/reduce/exact_sum/device_cuda.cuh"

namespace rlk {

// 8: columns of a block, a warp each; neighbours share the 32-byte sectors of a partial's row.
constexpr int COMBINE_WARPS = 8;

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

// partial [blocks, columns] of finite doubles; the state holds what was deeper, or zeros.
static __global__ void __launch_bounds__(COMBINE_WARPS * 32)
    combine_partials(const double* partial, int blocks, ExactState state) {
    const int lane = threadIdx.x % 32;
    const long long column = (long long)blockIdx.x * COMBINE_WARPS + threadIdx.x / 32;
    if (column >= state.columns) return;
    long long sum[LIMBS];
#pragma unroll
    for (int i = 0; i < LIMBS; ++i) sum[i] = 0;
#pragma unroll 4
    for (int block = lane; block < blocks; block += 32) {
        const double value = partial[block * state.columns + column];
#pragma unroll
        for (int i = 0; i < LIMBS; ++i) sum[i] += limb_of(value, i);
    }
#pragma unroll
    for (int i = 0; i < LIMBS; ++i) {
        for (int distance = 16; distance > 0; distance /= 2) {
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], distance);
        }
    }
    if (lane != 0) return;
    long long* limb = state.data + column;
#pragma unroll
    for (int i = 0; i < LIMBS; ++i) sum[i] += limb[i * state.columns];
    normalise_limbs(sum);
#pragma unroll
    for (int i = 0; i < LIMBS; ++i) limb[i * state.columns] = sum[i];
}

// Combine into a state that the first pass has zeroed and may have added to.
inline cudaError_t launch_combine(const double* partial, int blocks, ExactState state,
                                  cudaStream_t stream) {
    const int grid = (int)((state.columns + COMBINE_WARPS - 1) / COMBINE_WARPS);
    combine_partials<<<grid, COMBINE_WARPS * 32, 0, stream>>>(partial, blocks, state);
    return cudaGetLastError();
}

}  // namespace rlk
