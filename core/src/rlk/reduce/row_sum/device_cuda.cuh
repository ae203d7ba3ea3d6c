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
__device__ __forceinline__ float lane_dot(const float (&a)[LANE_TERMS],
                                          const float (&b)[LANE_TERMS]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < LANE_TERMS; ++i) sum = fma(a[i], b[i], sum);
  return sum;
}

// ORDER: balanced tree of adjacent pairs along the lanes of a chunk. Lanes beyond the row would
// add +0 to a sum that is never -0, so a short row uses fewer lanes with the same bits.
template <int LANES>
__device__ __forceinline__ float chunk_tree(float sum) {
#pragma unroll
  for (int distance = 1; distance < LANES; distance *= 2) {
    sum = add(sum, __shfl_xor_sync(0xffffffffu, sum, distance));
  }
  return sum;
}

}  // namespace rlk
