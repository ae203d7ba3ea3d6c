// SPDX-License-Identifier: Apache-2.0
// The chunk-256 order in CUDA: step 4 of golden.py, where a block holds rows, a warp one chunk.
#pragma once
#include "rlk/reduce/row_sum/device_cuda.cuh"

namespace rlk {

// ORDER: chunk sums ascending, from +0. All CHUNKS are added: those beyond the row are +0, which
// changes no sum.
template <int CHUNKS>
__device__ __forceinline__ float add_chunks(const float* sums) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) total = add(total, sums[i]);
    return total;
}

// Chunk sums of ROWS rows of a block, or of ROWS sums that one row takes: those of one turn, while
// the other half serves the next.
template <int CHUNKS, int ROWS> struct ChunkSums {
    float sums[2][ROWS][CHUNKS];

    // Whole blocks call; the first barrier of a turn comes after.
    __device__ __forceinline__ void clear() {
        for (int i = threadIdx.x; i < 2 * ROWS * CHUNKS; i += blockDim.x) {
            (&sums[0][0][0])[i] = 0.0f;
        }
        __syncthreads();
    }
    // The sum of row `threadIdx.x % ROWS` over all chunks. One barrier a turn.
    __device__ __forceinline__ float total(int turn, float (&lane_sums)[ROWS]) {
        give(turn, lane_sums);
        __syncthreads();
        return given(turn);
    }
    // The same in two steps, for work between them: a barrier of the block comes after the first.
    __device__ __forceinline__ void give(int turn, float (&lane_sums)[ROWS]) {
        const float chunk = chunk_trees<32>(lane_sums);
        if (threadIdx.x % 32 < ROWS) sums[turn % 2][threadIdx.x % ROWS][threadIdx.x / 32] = chunk;
    }
    __device__ __forceinline__ float given(int turn) const {
        return add_chunks<CHUNKS>(sums[turn % 2][threadIdx.x % ROWS]);
    }
};

// ORDER: chunk sums ascending, from +0.
__device__ __forceinline__ float add_long_chunks(const float* sums, int chunks) {
    float total = 0.0f;
    for (int i = 0; i < chunks; ++i) total = add(total, sums[i]);
    return total;
}

}  // namespace rlk
