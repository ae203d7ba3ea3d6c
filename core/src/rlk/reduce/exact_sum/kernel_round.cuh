// SPDX-License-Identifier: Apache-2.0
// The last pass of a column sum: integer states to their dtype.
#pragma once
#include "rlk/reduce/exact_sum/device_round.cuh"

namespace rlk {

// 256: columns of a block, one for each thread.
constexpr int ROUND_THREADS = 256;

__device__ __forceinline__ void load_limbs(ExactState state, long long column,
                                           long long (&limb)[LIMBS]) {
    for (int i = 0; i < LIMBS; ++i) limb[i] = state.data[i * state.columns + column];
    normalise_limbs(limb);
}

static __global__ void __launch_bounds__(ROUND_THREADS)
    round_state(ExactState state, int dtype, void* out) {
    const long long column = (long long)blockIdx.x * ROUND_THREADS + threadIdx.x;
    if (column >= state.columns) return;
    long long limb[LIMBS];
    load_limbs(state, column, limb);
    const long long* counter = state.data + LIMBS * state.columns + column;
    const Specials seen{counter[0] > 0, counter[state.columns] > 0,
                        counter[2 * state.columns] > 0};
    const uint32_t bits = round_column(limb, seen, format_of(dtype));
    if (dtype == kFloat32) {
        static_cast<uint32_t*>(out)[column] = bits;
    } else {
        static_cast<uint16_t*>(out)[column] = (uint16_t)bits;
    }
}

inline cudaError_t launch_round(ExactState state, int dtype, void* out, cudaStream_t stream) {
    const unsigned grid = (unsigned)((state.columns + ROUND_THREADS - 1) / ROUND_THREADS);
    round_state<<<grid, ROUND_THREADS, 0, stream>>>(state, dtype, out);
    return cudaGetLastError();
}

}  // namespace rlk
