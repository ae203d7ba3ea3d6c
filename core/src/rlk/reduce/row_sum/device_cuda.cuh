// SPDX-License-Identifier: Apache-2.0
// The chunk-256 order in CUDA: steps 2 and 3 of golden.py. A lane holds 8 contiguous terms; the
// lanes of one chunk are 2^k neighbours of a warp, 32 of them unless the row is shorter.
#pragma once
#include "rlk/math/device_cuda.cuh"

namespace rlk {

// 8: terms of a lane; 32 lanes of 8 make a chunk of 256.
constexpr int LANE_TERMS = 8;
constexpr int CHUNK = 256;

// ORDER: left to right within a lane, starting from +0
__device__ __forceinline__ float lane_sum(const float (&terms)[LANE_TERMS]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < LANE_TERMS; ++i) sum = add(sum, terms[i]);
  return sum;
}

// ORDER: the same
__device__ __forceinline__ float lane_dot(const float (&a)[LANE_TERMS],
                                          const float (&b)[LANE_TERMS]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < LANE_TERMS; ++i) sum = fma(a[i], b[i], sum);
  return sum;
}

// ORDER: balanced tree of adjacent pairs along the lanes of a chunk. Lanes beyond the row would
// add +0 to a sum that is never -0, so a short row uses fewer lanes with the same bits.
//
// Of ROWS rows at once: the result is that of row `threadIdx.x % ROWS`. A lane gives its
// partner the row that it does not keep, so ROWS rows take little more than the shuffles of one.
template <int LANES, int ROWS> __device__ __forceinline__ float chunk_trees(float (&sums)[ROWS]) {
  static_assert((ROWS & (ROWS - 1)) == 0 && ROWS <= LANES, "ROWS is a power of two of lanes");
#pragma unroll
  for (int distance = 1; distance < ROWS; distance *= 2) {
    const bool odd = threadIdx.x & distance;
#pragma unroll
    for (int i = 0; i < ROWS / 2 / distance; ++i) {
      const float keep = odd ? sums[2 * i + 1] : sums[2 * i];
      const float give = odd ? sums[2 * i] : sums[2 * i + 1];
      sums[i] = add(keep, __shfl_xor_sync(0xffffffffu, give, distance));
    }
  }
  float sum = sums[0];
#pragma unroll
  for (int distance = ROWS; distance < LANES; distance *= 2) {
    sum = add(sum, __shfl_xor_sync(0xffffffffu, sum, distance));
  }
  return sum;
}

template <int LANES> __device__ __forceinline__ float chunk_tree(float sum) {
  float sums[1] = {sum};
  return chunk_trees<LANES>(sums);
}

}  // namespace rlk
