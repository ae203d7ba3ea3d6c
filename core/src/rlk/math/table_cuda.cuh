// SPDX-License-Identifier: Apache-2.0
// Sigmoids of BF16 values from a table in shared memory: there are few such values, and a sigmoid
// costs a dozen operations. Bits as of sigmoids().
#pragma once
#include "rlk/cuda/rows.cuh"
#include "rlk/math/device_cuda.cuh"

namespace rlk {

// Derivatives of an activation by its sigmoids: of x * s, or of s itself.
template <int N>
__device__ __forceinline__ void derivatives(const float (&x)[N], const float (&s)[N], bool is_silu,
                                            float (&derivative)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    derivative[i] = is_silu ? silu_derivative(x[i], s[i]) : sigmoid_derivative(s[i]);
  }
}

// One entry for each z with 2^-25 <= |z| < 64; smaller ones have the entry of 2^-25, where the
// sigmoid is 1/2 and nothing that is added to 1 changes it.
struct TableIndex {
  static constexpr uint32_t LOWEST = 0x3300, HIGHEST = 0x4280;  // BF16 patterns of 2^-25 and 64
  static constexpr int POSITIVE = HIGHEST - LOWEST;
  static constexpr int NEGATIVE = 4096;  // where those of negative z begin: at a bit
  static constexpr int ENTRIES = NEGATIVE + POSITIVE;
  static_assert(POSITIVE <= NEGATIVE, "indices are apart");

  uint32_t pairs[ELEMENTS / 2];
  bool inside;  // whether all eight values have an entry

  // Two values in each word, so that most operations serve both.
  __device__ __forceinline__ explicit TableIndex(const Packed<__nv_bfloat16>& packed) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(&packed);
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < ELEMENTS / 2; ++i) {
      // max(|z| - LOWEST, 0) of patterns
      pairs[i] = __viaddmax_s16x2(words[i] & 0x7fff7fffu, 0x10001u * (0x10000u - LOWEST), 0u);
      most = __vmaxs2(most, pairs[i]);
      pairs[i] |= words[i] >> 3 & 0x10001u * NEGATIVE;
    }
    // What an entry lacks to 2^15 sets its upper bit if it is too large.
    inside = ((most + 0x10001u * (0x8000u - POSITIVE)) & 0x80008000u) == 0;
  }
  // Bytes from the start of a table to the entry of value i.
  template <int ENTRY_BYTES> __device__ __forceinline__ uint32_t offset(int i) const {
    return __dp2a_lo(pairs[i / 2], i % 2 == 0 ? (uint32_t)ENTRY_BYTES : ENTRY_BYTES << 8, 0u);
  }
  // Whole blocks call `store(index, z)` for every entry.
  template <typename Store> static __device__ __forceinline__ void for_each(Store store) {
    for (int i = threadIdx.x; i < POSITIVE; i += blockDim.x) {
      const float z = __uint_as_float((LOWEST + i) << 16);
      store(i, z);
      store(NEGATIVE + i, -z);
    }
  }
};

__device__ __forceinline__ float near_sigmoid(float x) {
  return reciprocal_in_range(one_plus_exp_negated_near(x));
}

// A barrier comes between `fill` and the first use.
struct SigmoidTable {
  static constexpr int BYTES = TableIndex::ENTRIES * (int)sizeof(float);

  const char* values;

  static __device__ __forceinline__ SigmoidTable fill(void* shared) {
    float* at = static_cast<float*>(shared);
    TableIndex::for_each([&](int i, float z) { at[i] = near_sigmoid(z); });
    return {static_cast<const char*>(shared)};
  }
  __device__ __forceinline__ void find(const Packed<__nv_bfloat16>& packed,
                                       const float (&z)[ELEMENTS], float (&s)[ELEMENTS]) const {
    const TableIndex index(packed);
    if (index.inside) {
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) {
        s[i] = *reinterpret_cast<const float*>(values + index.offset<sizeof(float)>(i));
      }
    } else {
      far_sigmoids(z, s);
    }
  }
  __device__ __forceinline__ void find(const Packed<__nv_bfloat16>& packed,
                                       const float (&z)[ELEMENTS], bool is_silu,
                                       float (&s)[ELEMENTS], float (&derivative)[ELEMENTS]) const {
    find(packed, z, s);
    derivatives(z, s, is_silu, derivative);
  }
};

// The same with the derivatives of one activation.
struct DerivativeTable {
  static constexpr int BYTES = TableIndex::ENTRIES * (int)sizeof(float2);

  const char* values;

  static __device__ __forceinline__ DerivativeTable fill(void* shared, bool is_silu) {
    float2* at = static_cast<float2*>(shared);
    TableIndex::for_each([&](int i, float z) {
      const float x[1] = {z}, s[1] = {near_sigmoid(z)};
      float derivative[1];
      derivatives(x, s, is_silu, derivative);
      at[i] = {s[0], derivative[0]};
    });
    return {static_cast<const char*>(shared)};
  }
  __device__ __forceinline__ void find(const Packed<__nv_bfloat16>& packed,
                                       const float (&z)[ELEMENTS], bool is_silu,
                                       float (&s)[ELEMENTS], float (&derivative)[ELEMENTS]) const {
    const TableIndex index(packed);
    if (index.inside) {
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) {
        const float2 entry =
            *reinterpret_cast<const float2*>(values + index.offset<sizeof(float2)>(i));
        s[i] = entry.x;
        derivative[i] = entry.y;
      }
    } else {
      far_sigmoids(z, s);
      derivatives(z, s, is_silu, derivative);
    }
  }
};

// Where there is no table.
struct ComputedSigmoids {
  template <typename T>
  __device__ __forceinline__ void find(const Packed<T>&, const float (&z)[ELEMENTS],
                                       float (&s)[ELEMENTS]) const {
    sigmoids(z, s);
  }
  template <typename T>
  __device__ __forceinline__ void find(const Packed<T>&, const float (&z)[ELEMENTS], bool is_silu,
                                       float (&s)[ELEMENTS], float (&derivative)[ELEMENTS]) const {
    sigmoids(z, s);
    derivatives(z, s, is_silu, derivative);
  }
};

}  // namespace rlk
