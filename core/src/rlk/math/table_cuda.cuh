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
  // The index of one value; ENTRIES or more where there is no entry.
  static __device__ __forceinline__ uint32_t of(uint32_t pattern) {
    return ((pattern * 2 - 2 * LOWEST) & 0xfffeu) | pattern >> 15;
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

// Whether all eight are +0, with which batches are padded.
__device__ __forceinline__ bool is_padding(const Packed<__nv_bfloat16>& packed) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(&packed);
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < ELEMENTS / 2; ++i) any |= words[i];
  return any == 0;
}

__device__ __forceinline__ float near_sigmoid(float x) {
  return reciprocal_in_range(one_plus_exp_negated_near(x));
}

// What has no entry: zeros, and ends of the range. One step for each value, so that it stays short.
template <typename Entry> struct FarValues {
  Entry at[ELEMENTS];
};
template <typename Entry>
static __device__ __noinline__ FarValues<Entry> far_values(Packed<__nv_bfloat16> packed,
                                                           const char* entries, bool is_silu) {
  FarValues<Entry> found;
#pragma unroll 1
  for (int i = 0; i < ELEMENTS; ++i) {
    const float z = to_float(packed.value[i]);
    const uint32_t index = TableIndex::of(__float_as_uint(z) >> 16);
    if (index < TableIndex::ENTRIES) {
      found.at[i] = reinterpret_cast<const Entry*>(entries)[index];
      continue;
    }
    found.at[i] = Entry::of(z, z == 0.0f ? 0.5f : sigmoid(z), is_silu);
  }
  return found;
}

// An activation.
struct ActivationEntry {
  float act;

  static __device__ __forceinline__ ActivationEntry of(float z, float sigmoid, bool is_silu) {
    const float x[1] = {z}, s[1] = {sigmoid};
    float act[1];
    activations(x, s, is_silu, act);
    return {act[0]};
  }
};

// The same with its derivative.
struct alignas(8) DerivativeEntry {
  float act, derivative;

  static __device__ __forceinline__ DerivativeEntry of(float z, float sigmoid, bool is_silu) {
    const float x[1] = {z}, s[1] = {sigmoid};
    float act[1], derivative[1];
    activations(x, s, is_silu, act);
    derivatives(x, s, is_silu, derivative);
    return {act[0], derivative[0]};
  }
};

// A barrier comes between `fill` and the first use.
template <typename Entry> struct Table {
  static constexpr int BYTES = TableIndex::ENTRIES * (int)sizeof(Entry);

  const char* entries;

  static __device__ __forceinline__ Table fill(void* shared, bool is_silu) {
    Entry* at = static_cast<Entry*>(shared);
    TableIndex::for_each(
        [&](int i, float z) { at[i] = Entry::of(z, near_sigmoid(z), is_silu); });
    return {static_cast<const char*>(shared)};
  }
  // `store(i, entry)` for each value.
  template <typename Store>
  __device__ __forceinline__ void find(const Packed<__nv_bfloat16>& packed, bool is_silu,
                                       Store store) const {
    const TableIndex index(packed);
    if (index.inside) {
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) {
        store(i, *reinterpret_cast<const Entry*>(entries + index.offset<sizeof(Entry)>(i)));
      }
    } else if (is_padding(packed)) {
      const Entry of_zero = Entry::of(0.0f, 0.5f, is_silu);
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) store(i, of_zero);
    } else {
      const FarValues<Entry> far = far_values<Entry>(packed, entries, is_silu);
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) store(i, far.at[i]);
    }
  }
};

struct ActivationTable {
  using Entries = Table<ActivationEntry>;
  static constexpr int BYTES = Entries::BYTES;

  Entries table;

  static __device__ __forceinline__ ActivationTable fill(void* shared, bool is_silu) {
    return {Entries::fill(shared, is_silu)};
  }
  __device__ __forceinline__ void find(const Packed<__nv_bfloat16>& packed, bool is_silu,
                                       float (&act)[ELEMENTS]) const {
    table.find(packed, is_silu, [&](int i, ActivationEntry entry) { act[i] = entry.act; });
  }
};

struct DerivativeTable {
  using Entries = Table<DerivativeEntry>;
  static constexpr int BYTES = Entries::BYTES;

  Entries table;

  static __device__ __forceinline__ DerivativeTable fill(void* shared, bool is_silu) {
    return {Entries::fill(shared, is_silu)};
  }
  __device__ __forceinline__ void find(const Packed<__nv_bfloat16>& packed, bool is_silu,
                                       float (&act)[ELEMENTS], float (&derivative)[ELEMENTS]) const {
    table.find(packed, is_silu, [&](int i, DerivativeEntry entry) {
      act[i] = entry.act;
      derivative[i] = entry.derivative;
    });
  }
};

// Where there is no table.
struct ComputedActivations {
  template <typename T>
  __device__ __forceinline__ void find(const Packed<T>& packed, bool is_silu,
                                       float (&act)[ELEMENTS]) const {
    float z[ELEMENTS], s[ELEMENTS];
    unpack(packed, z);
    sigmoids(z, s);
    activations(z, s, is_silu, act);
  }
  template <typename T>
  __device__ __forceinline__ void find(const Packed<T>& packed, bool is_silu,
                                       float (&act)[ELEMENTS], float (&derivative)[ELEMENTS]) const {
    float z[ELEMENTS], s[ELEMENTS];
    unpack(packed, z);
    sigmoids(z, s);
    derivatives(z, s, is_silu, derivative);
    activations(z, s, is_silu, act);
  }
};

}  // namespace rlk
