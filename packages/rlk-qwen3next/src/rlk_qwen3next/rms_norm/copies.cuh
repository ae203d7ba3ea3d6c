// SPDX-License-Identifier: Apache-2.0
// Copies to shared memory that a thread waits for itself: many bytes are on their way without
// holding registers.
#pragma once
#include <cuda_pipeline.h>

#include "rlk/cuda/rows.cuh"

namespace rlk {

// Begin to copy, or have zeros there and read nothing. One instruction for both.
template <int BYTES>
__device__ __forceinline__ void copy_or_zero(void* to, const void* from, bool exists) {
    static_assert(BYTES == 4 || BYTES == 16, "what is copied here");
    const unsigned at = (unsigned)__cvta_generic_to_shared(to);
    if (BYTES == 16) {
        asm volatile("{.reg .pred p; setp.eq.s32 p, %2, 0;\n"
                     "cp.async.cg.shared.global [%0], [%1], 16, p;}"
                     ::"r"(at), "l"(from), "r"((int)exists)
                     : "memory");
    } else {
        asm volatile("{.reg .pred p; setp.eq.s32 p, %2, 0;\n"
                     "cp.async.ca.shared.global [%0], [%1], 4, p;}"
                     ::"r"(at), "l"(from), "r"((int)exists)
                     : "memory");
    }
}

// Eight elements, whose words lie `threads` apart in shared memory.
template <typename T>
__device__ __forceinline__ void copy_eight(const T* from, uint4* to, int threads, bool exists) {
#pragma unroll
    for (int w = 0; w < Packed<T>::WORDS; ++w) {
        copy_or_zero<sizeof(uint4)>(to + w * threads, reinterpret_cast<const uint4*>(from) + w,
                                    exists);
    }
}
template <typename T>
__device__ __forceinline__ Packed<T> copied_eight(const uint4* from, int threads) {
    Packed<T> packed;
    uint4* to = reinterpret_cast<uint4*>(&packed);
#pragma unroll
    for (int w = 0; w < Packed<T>::WORDS; ++w) to[w] = from[w * threads];
    return packed;
}

// Wait for all but the last AFTER groups of this thread's copies.
template <int AFTER> __device__ __forceinline__ void wait_for_copies() {
    __pipeline_wait_prior(AFTER);
    // The wait alone does not keep the compiler from loading before it.
    asm volatile("" ::: "memory");
}

}  // namespace rlk
