// SPDX-License-Identifier: Apache-2.0
// Activations of BF16 values from a table in shared memory: there are few such values, and one costs
// two dozen operations. Bits as of sigmoids() and what follows it.
#pragma once
#include "rlk/cuda/rows.cuh"
#include "rlk/math/device_cuda.cuh"

namespace rlk {

// Activations by their sigmoids: x * s, or s itself.
template <int N>
__device__ __forceinline__ void activations(const float (&x)[N], const float (&s)[N], bool is_silu,
                                            float (&act)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) act[i] = is_silu ? silu(x[i], s[i]) : s[i];
}

// Their derivatives.
template <int N>
__device__ __forceinline__ void derivatives(const float (&x)[N], const float (&s)[N], bool is_silu,
                                            float (&derivative)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    derivative[i] = is_silu ? silu_derivative(x[i], s[i]) : sigmoid_derivative(s[i]);
  }
}

// One entry for each z with LOWEST <= |z| < HIGHEST; a number and its negative are neighbours.
struct TableIndex {
  static constexpr uint32_t LOWEST = 0x32a0, HIGHEST = 0x42a0;  // BF16 patterns of 1.25 * 2^-26, 80
  static constexpr int ENTRIES = 2 * (HIGHEST - LOWEST);
  // A power of two: the bits above an index tell whether there is such an entry.
  static_assert(ENTRIES == 1 << 13, "indices are all numbers of 13 bits");

  uint32_t pairs[ELEMENTS / 2];
  bool inside;  // whether all eight values have an entry

  // Two values in each word, so that most operations serve both. An index is the pattern less
  // LOWEST, its sign in the lowest bit; what is too small wraps around to a large one, and carries
  // into the other half of its word only then.
  __device__ __forceinline__ explicit TableIndex(const Packed<__nv_bfloat16>& packed) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(&packed);
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < ELEMENTS / 2; ++i) {
      const uint32_t doubled = words[i] * 2 - 0x10001u * (2 * LOWEST), signs = words[i] >> 15;
      // The lowest bit of each half is that of `signs`.
      pairs[i] = signs ^ ((doubled ^ signs) & 0xfffefffeu);
      any |= pairs[i];
    }
    inside = (any & 0x10001u * (0x10000u - ENTRIES)) == 0;
  }
  // Bytes from the start of a table to the entry of value i.
  template <int ENTRY_BYTES> __device__ __forceinline__ uint32_t offset(int i) const {
    return __dp2a_lo(pairs[i / 2], i % 2 == 0 ? (uint32_t)ENTRY_BYTES : ENTRY_BYTES << 8, 0u);
  }
  // Whole blocks call `store(index, z)` for every entry.
  template <typename Store> static __device__ __forceinline__ void for_each(Store store) {
    for (int i = threadIdx.x; i < ENTRIES / 2; i += blockDim.x) {
      const float z = __uint_as_float((LOWEST + i) << 16);
      store(2 * i, z);
      store(2 * i + 1, -z);
    }
  }
};

__device__ __forceinline__ float near_sigmoid(float x) {
  return reciprocal_in_range(one_plus_exp_negated_near(x));
}

// What has no entry: zeros, and ends of the range. Functions of their own, so that loops stay short. Of
// +0 alone, with which batches are padded, the first value is that of all.
__device__ __forceinline__ bool is_padding(const Packed<__nv_bfloat16>& packed) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(&packed);
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < ELEMENTS / 2; ++i) any |= words[i];
  return any == 0;
}
struct FoundPair {
  float act[ELEMENTS], derivative[ELEMENTS];
};
static __device__ __noinline__ FoundPair far_pairs(Packed<__nv_bfloat16> packed, bool is_silu) {
  FoundPair found;
  float z[ELEMENTS];
  unpack(packed, z);
  const bool padding = is_padding(packed);
#pragma unroll 1
  for (int i = 0; i < ELEMENTS; ++i) {
    if (padding && i > 0) {
      found.act[i] = found.act[0];
      found.derivative[i] = found.derivative[0];
      continue;
    }
    const float x[1] = {z[i]}, s[1] = {z[i] == 0.0f ? 0.5f : sigmoid(z[i])};
    float act[1], derivative[1];
    activations(x, s, is_silu, act);
    derivatives(x, s, is_silu, derivative);
    found.act[i] = act[0];
    found.derivative[i] = derivative[0];
  }
  return found;
}
static __device__ __noinline__ Values<ELEMENTS> far_activations(Packed<__nv_bfloat16> packed,
                                                                bool is_silu) {
  Values<ELEMENTS> found;
  float z[ELEMENTS];
  unpack(packed, z);
  const bool padding = is_padding(packed);
#pragma unroll 1
  for (int i = 0; i < ELEMENTS; ++i) {
    if (padding && i > 0) {
      found.at[i] = found.at[0];
      continue;
    }
    const float s = z[i] == 0.0f ? 0.5f : sigmoid(z[i]);
    found.at[i] = is_silu ? silu(z[i], s) : s;
  }
  return found;
}

// Activations. A barrier comes between `fill` and the first use. `exists` says of zeros whether they
// were read: lanes beyond a row, which have others, would call for their values in every turn.
struct ActivationTable {
  static constexpr int BYTES = TableIndex::ENTRIES * (int)sizeof(float);

  const char* values;

  static __device__ __forceinline__ ActivationTable fill(void* shared, bool is_silu) {
    float* at = static_cast<float*>(shared);
    TableIndex::for_each([&](int i, float z) {
      const float s = near_sigmoid(z);
      at[i] = is_silu ? silu(z, s) : s;
    });
    return {static_cast<const char*>(shared)};
  }
  __device__ __forceinline__ void find(const Packed<__nv_bfloat16>& packed, bool exists, bool is_silu,
                                       float (&act)[ELEMENTS]) const {
    const TableIndex index(packed);
    if (index.inside) {
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) {
        act[i] = *reinterpret_cast<const float*>(values + index.offset<sizeof(float)>(i));
      }
    } else if (exists) {
      const Values<ELEMENTS> far = far_activations(packed, is_silu);
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) act[i] = far.at[i];
    } else {
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) act[i] = 0.0f;
    }
  }
};

// The same with their derivatives.
struct DerivativeTable {
  static constexpr int BYTES = TableIndex::ENTRIES * (int)sizeof(float2);

  const char* values;

  static __device__ __forceinline__ DerivativeTable fill(void* shared, bool is_silu) {
    float2* at = static_cast<float2*>(shared);
    TableIndex::for_each([&](int i, float z) {
      const float x[1] = {z}, s[1] = {near_sigmoid(z)};
      float act[1], derivative[1];
      activations(x, s, is_silu, act);
      derivatives(x, s, is_silu, derivative);
      at[i] = {act[0], derivative[0]};
    });
    return {static_cast<const char*>(shared)};
  }
  __device__ __forceinline__ void find(const Packed<__nv_bfloat16>& packed, bool exists, bool is_silu,
                                       float (&act)[ELEMENTS], float (&derivative)[ELEMENTS]) const {
    const TableIndex index(packed);
    if (index.inside) {
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) {
        const float2 entry =
            *reinterpret_cast<const float2*>(values + index.offset<sizeof(float2)>(i));
        act[i] = entry.x;
        derivative[i] = entry.y;
      }
    } else if (exists) {
      const FoundPair far = far_pairs(packed, is_silu);
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) {
        act[i] = far.act[i];
        derivative[i] = far.derivative[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) act[i] = derivative[i] = 0.0f;
    }
  }
};

// Where there is no table.
struct ComputedActivations {
  template <typename T>
  __device__ __forceinline__ void find(const Packed<T>& packed, bool, bool is_silu,
                                       float (&act)[ELEMENTS]) const {
    float z[ELEMENTS], s[ELEMENTS];
    unpack(packed, z);
    sigmoids(z, s);
    activations(z, s, is_silu, act);
  }
  template <typename T>
  __device__ __forceinline__ void find(const Packed<T>& packed, bool, bool is_silu,
                                       float (&act)[ELEMENTS], float (&derivative)[ELEMENTS]) const {
    float z[ELEMENTS], s[ELEMENTS];
    unpack(packed, z);
    sigmoids(z, s);
    derivatives(z, s, is_silu, derivative);
    activations(z, s, is_silu, act);
  }
};

}  // namespace rlk
