// SPDX-License-Identifier: Apache-2.0
// Eight neighbouring elements of a row to FP32 and back, whatever dtype and strides.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "rlk/cuda/launch.cuh"

namespace rlk {

constexpr int ELEMENTS = 8;

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }

template <typename T> __device__ __forceinline__ T from_float(float v);
template <> __device__ __forceinline__ float from_float<float>(float v) { return v; }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}
template <> __device__ __forceinline__ __half from_float<__half>(float v) {
  return __float2half_rn(v);
}

// How many of a lane's elements lie in the row; none or all of them in a row read by words.
__device__ __forceinline__ int elements_inside(int column, int columns) {
    const int left = columns - column;
    return left < 0 ? 0 : (left < ELEMENTS ? left : ELEMENTS);
}

// Eight elements as they lie in memory: one 16-byte word for narrow types, two for FP32.
template <typename T> struct alignas(16) Packed {
  static constexpr int WORDS = ELEMENTS * sizeof(T) / sizeof(uint4);
  T value[ELEMENTS];
};

// Rows [T, columns] that are only read; strides in elements.
template <typename T> struct Rows {
  const T* data;
  long long row_stride;
  long long column_stride;
};

// Where a lane reads in the rows of its turns: rows `turn` apart from `row` on, eight elements from
// `column` on. An addition a turn instead of a product of 64 bits.
template <typename T> struct Cursor {
  const T* at;
  long long step;           // elements from one turn to the next
  long long column_stride;

  __device__ __forceinline__ Cursor(const Rows<T>& rows, long long row, int column,
                                    long long turn)
      : at(rows.data + row * rows.row_stride + column * rows.column_stride),
        step(turn * rows.row_stride), column_stride(rows.column_stride) {}

  __device__ __forceinline__ void advance() { at += step; }

  // `count` elements, of eight at most, and zeros; by words all eight or none. `offset` elements
  // further, such as in another row of the turn.
  template <bool VECTOR>
  __device__ __forceinline__ Packed<T> load(int count, long long offset = 0) const {
    Packed<T> packed;
    const T* from = at + offset;
    if (VECTOR) {
      uint4* words = reinterpret_cast<uint4*>(&packed);
#pragma unroll
      for (int i = 0; i < Packed<T>::WORDS; ++i) {
        words[i] = count > 0 ? __ldcs(reinterpret_cast<const uint4*>(from) + i)
                             : make_uint4(0, 0, 0, 0);
      }
    } else {
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) {
        packed.value[i] = i < count ? from[i * column_stride] : from_float<T>(0.0f);
      }
    }
    return packed;
  }
};

template <typename T>
__device__ __forceinline__ void unpack(const Packed<T>& packed, float (&out)[ELEMENTS]) {
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) out[i] = to_float(packed.value[i]);
}

// BF16 is the upper half of FP32: one operation an element.
__device__ __forceinline__ void unpack(const Packed<__nv_bfloat16>& packed,
                                       float (&out)[ELEMENTS]) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(&packed);
#pragma unroll
  for (int i = 0; i < ELEMENTS / 2; ++i) {
    out[2 * i] = __uint_as_float(words[i] << 16);
    out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

// Store `count` elements, of eight at most; by words all or none.
template <bool VECTOR, typename T>
__device__ __forceinline__ void store_packed(T* at, int count, const Packed<T>& packed) {
  if (VECTOR) {
    if (count <= 0) return;
    const uint4* words = reinterpret_cast<const uint4*>(&packed);
#pragma unroll
    for (int i = 0; i < Packed<T>::WORDS; ++i) __stcs(reinterpret_cast<uint4*>(at) + i, words[i]);
  } else {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
      if (i < count) at[i] = packed.value[i];
    }
  }
}

// The same of FP32 values, rounded once to their dtype.
template <bool VECTOR, typename T>
__device__ __forceinline__ void store(T* at, int count, const float (&in)[ELEMENTS]) {
  if (count <= 0) return;
  Packed<T> packed;
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) packed.value[i] = from_float<T>(in[i]);
  store_packed<VECTOR>(at, count, packed);
}

// Eight parameters to FP32, zero from `columns` on. All are loaded before the first is used.
template <typename P>
__device__ __forceinline__ void load_parameter(const P* data, long long stride, int column,
                                               int columns, float (&out)[ELEMENTS]) {
  Packed<P> packed;
  const P* at = data + column * stride;
  if (stride == 1 && column + ELEMENTS <= columns && reinterpret_cast<uintptr_t>(at) % 16 == 0) {
    packed = *reinterpret_cast<const Packed<P>*>(at);
  } else {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
      packed.value[i] = column + i < columns ? at[i * stride] : from_float<P>(0.0f);
    }
  }
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) out[i] = to_float(packed.value[i]);
}

__device__ __forceinline__ void load_parameter(const void* data, int dtype, long long stride,
                                               int column, int columns,
                                               float (&out)[ELEMENTS]) {
  if (dtype == kFloat32) {
    load_parameter(static_cast<const float*>(data), stride, column, columns, out);
  } else if (dtype == kBFloat16) {
    load_parameter(static_cast<const __nv_bfloat16*>(data), stride, column, columns, out);
  } else {
    load_parameter(static_cast<const __half*>(data), stride, column, columns, out);
  }
}

// Whether rows of `columns` elements can be read by 16-byte words.
inline bool vector_rows(const void* data, long long row_stride, long long column_stride,
                        long long columns, int element_bytes) {
  return column_stride == 1 && columns % ELEMENTS == 0 &&
         reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_stride * element_bytes % 16 == 0;
}

// Call `function` with a zero of the type that a dtype code names.
template <typename Function> cudaError_t by_dtype(int dtype, Function function) {
    switch (dtype) {
        case kFloat32: return function(float());
        case kBFloat16: return function(__nv_bfloat16());
        case kFloat16: return function(__half());
    }
    return cudaErrorInvalidValue;
}

}  // namespace rlk
