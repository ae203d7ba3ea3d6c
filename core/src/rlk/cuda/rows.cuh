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

// Eight elements as they lie in memory: one 16-byte word for narrow types, two for FP32.
template <typename T> struct alignas(16) Packed {
  T value[ELEMENTS];
};

// Rows [T, columns] that are only read; strides in elements.
template <typename T> struct Rows {
  const T* data;
  long long row_stride;
  long long column_stride;

  // Eight elements from `column`, zero from `columns` on.
  template <bool VECTOR>
  __device__ __forceinline__ Packed<T> load(long long row, int column, int columns) const {
    Packed<T> packed;
    if (VECTOR) {
      const uint4* source =
          reinterpret_cast<const uint4*>(data + row * row_stride + column);
      uint4* words = reinterpret_cast<uint4*>(&packed);
#pragma unroll
      for (int i = 0; i < (int)(sizeof(Packed<T>) / sizeof(uint4)); ++i) {
        words[i] = column < columns ? __ldcs(source + i) : make_uint4(0, 0, 0, 0);
      }
    } else {
      const T* source = data + row * row_stride;
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) {
        packed.value[i] = column + i < columns
                              ? source[(long long)(column + i) * column_stride]
                              : from_float<T>(0.0f);
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

// Store eight elements of a contiguous [T, columns] output, rounded once to its dtype.
template <bool VECTOR, typename T>
__device__ __forceinline__ void store(T* data, long long row, int column, int columns,
                                      const float (&in)[ELEMENTS]) {
  T* target = data + row * columns + column;
  if (VECTOR) {
    if (column >= columns) return;
    Packed<T> packed;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) packed.value[i] = from_float<T>(in[i]);
    const uint4* words = reinterpret_cast<const uint4*>(&packed);
#pragma unroll
    for (int i = 0; i < (int)(sizeof(Packed<T>) / sizeof(uint4)); ++i) {
      __stcs(reinterpret_cast<uint4*>(target) + i, words[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
      if (column + i < columns) target[i] = from_float<T>(in[i]);
    }
  }
}

// Eight parameters of either dtype to FP32, zero from `columns` on.
__device__ __forceinline__ void load_parameter(const void* data, int dtype, long long stride,
                                               int column, int columns,
                                               float (&out)[ELEMENTS]) {
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) {
    const long long at = (long long)(column + i) * stride;
    float value = 0.0f;
    if (column + i < columns) {
      if (dtype == kFloat32) value = static_cast<const float*>(data)[at];
      if (dtype == kBFloat16) value = to_float(static_cast<const __nv_bfloat16*>(data)[at]);
      if (dtype == kFloat16) value = to_float(static_cast<const __half*>(data)[at]);
    }
    out[i] = value;
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
