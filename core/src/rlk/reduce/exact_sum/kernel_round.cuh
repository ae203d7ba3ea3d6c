// SPDX-License-Identifier: Apache-2.0
// The last pass of a column sum: integer states to their dtype.
#pragma once
#include "rlk/cuda/early.cuh"
#include "rlk/reduce/exact_sum/device_round.cuh"

namespace rlk {

// 256: columns of a block, one for each thread.
constexpr int ROUND_THREADS = 256;

static __global__ void __launch_bounds__(ROUND_THREADS)
    round_state(ExactState state, int dtype, void* out) {
    const long long column = (long long)blockIdx.x * ROUND_THREADS + threadIdx.x;
    if (column >= state.columns) return;
    finish_state(state, column, column, {{}, out, dtype, kRounded});
}

inline cudaError_t launch_round(ExactState state, int dtype, void* out, cudaStream_t stream) {
    const unsigned grid = (unsigned)((state.columns + ROUND_THREADS - 1) / ROUND_THREADS);
    return launch_kernel<round_state>(false, dim3(grid), ROUND_THREADS, 0, 0, stream, state, dtype,
                                      out);
}

}  // namespace rlk
