// SPDX-License-Identifier: Apache-2.0
// Zeros for sums that a kernel adds to, whose blocks come up while they are written.
#pragma once
#include "rlk/cuda/early.cuh"

namespace rlk {

// 1024 threads, of 4 words each: few blocks, so that most processors are free for the next kernel.
constexpr int ZERO_THREADS = 1024, ZERO_STORES = 4;

static __global__ void __launch_bounds__(ZERO_THREADS) store_zeros(long long* words,
                                                                   long long count) {
    let_second_pass_start();
    const long long first = (long long)blockIdx.x * ZERO_THREADS * ZERO_STORES + threadIdx.x;
#pragma unroll
    for (int k = 0; k < ZERO_STORES; ++k) {
        const long long at = first + k * ZERO_THREADS;
        if (at < count) words[at] = 0;
    }
}

// Integers or doubles. The next kernel is launched early, and waits before it adds.
inline cudaError_t launch_zeros(void* words, long long count, int device, cudaStream_t stream) {
    constexpr int BLOCK = ZERO_THREADS * ZERO_STORES;
    return launch_kernel<store_zeros>(false, dim3((unsigned)((count + BLOCK - 1) / BLOCK)),
                                      ZERO_THREADS, 0, device, stream,
                                      static_cast<long long*>(words), count);
}

}  // namespace rlk
