// SPDX-License-Identifier: Apache-2.0
// What the kernels call. Steps named as in golden.
#pragma once
#include "rlk/cuda/rows.cuh"
#include "rlk/cuda/shared.cuh"
#include "rlk/math/device_cuda.cuh"
#include "rlk/reduce/exact_sum/device_round.cuh"
#include "rlk/reduce/row_sum/block_cuda.cuh"

namespace rlk {

// Tokens [T, S, N] that are only read; strides in elements.
template <typename T> struct Tokens {
    const T* data;
    long long sample_stride, token_stride, column_stride;

    __device__ __forceinline__ Rows<T> of(long long sample) const {
        return {data + sample * sample_stride, token_stride, column_stride};
    }
    __device__ __forceinline__ const T* at(long long sample, long long token, int column) const {
        return data + sample * sample_stride + token * token_stride + column * column_stride;
    }
};

// mean or rstd [T, S].
struct Statistic {
    const float* data;
    long long sample_stride, token_stride;

    __device__ __forceinline__ const float* of(long long sample) const {
        return data + sample * sample_stride;
    }
};

// scale or shift [T, N].
struct Modulation {
    const void* data;
    long long sample_stride, column_stride;

    template <typename T>
    __device__ __forceinline__ Packed<T> load(long long sample, int column, int columns) const {
        const T* at = static_cast<const T*>(data) + sample * sample_stride + column * column_stride;
        const bool by_words = column_stride == 1 && column + ELEMENTS <= columns &&
                              reinterpret_cast<uintptr_t>(at) % 16 == 0;
        return by_words ? *reinterpret_cast<const Packed<T>*>(at)
                        : by_elements(at, column_stride, columns - column);
    }
    // A function of its own, so that loops which seldom take this way stay short.
    template <typename T>
    __device__ __noinline__ static Packed<T> by_elements(const T* at, long long stride, int left) {
        Packed<T> packed;
        for (int i = 0; i < ELEMENTS; ++i) {
            packed.value[i] = i < left ? at[i * stride] : from_float<T>(0.0f);
        }
        return packed;
    }
};

// Operands of one call; a result that is not needed is null.
template <typename T> struct Arguments {
    Tokens<T> dout, x;
    Modulation scale, shift;
    Statistic mean, rstd;
    T *out, *dx, *dscale, *dshift;
    float *mean_out, *rstd_out;
    long long samples, tokens;
    int columns;
    Divisor length;  // columns, as what sums are divided by
    float eps;
};

// 2: tokens that a block of the backward works on at once: more in flight, and the steps that a token
// takes once (trees, quotient, barrier) are shared.
constexpr int TURN = 2;
// 32 warps of one chunk each: the longest row whose values stay in registers.
constexpr int WIDE_WARPS = 32;

// 1 + scale of a lane's columns.
template <typename T>
__device__ __forceinline__ void factor(const Packed<T>& scale, float (&out)[ELEMENTS]) {
    unpack(scale, out);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) out[i] = add(1.0f, out[i]);
}

// x - mean of `count` elements; beyond the row 0 - mean would be a term. By words a lane has all
// elements or, of zeros, none.
__device__ __forceinline__ void centre(bool by_words, const float (&x)[ELEMENTS], float mean,
                                       int count, float (&out)[ELEMENTS]) {
    const float by = by_words && count == 0 ? 0.0f : mean;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        out[i] = by_words || i < count ? subtract(x[i], by) : 0.0f;
    }
}

// (x - mean) * rstd of `count` elements; zero beyond the row, where an infinite rstd makes NaN.
// By words a lane has all elements or, of zeros, none.
__device__ __forceinline__ void normalise(bool by_words, const float (&x)[ELEMENTS], float mean,
                                          float rstd, int count, float (&out)[ELEMENTS]) {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        const float xhat = multiply(subtract(x[i], mean), rstd);
        out[i] = by_words || i < count ? xhat : 0.0f;
    }
}

// 1 / sqrt(sum / N + eps)
__device__ __forceinline__ float inverse_deviation(float sum_of_squares, Divisor columns,
                                                   float eps) {
    return reciprocal(sqrt(add(divide(sum_of_squares, columns), eps)));
}

// xhat * (1 + scale) + shift, each step rounded.
__device__ __forceinline__ float modulate(float xhat, float factor, float shift) {
    return add(multiply(xhat, factor), shift);
}

// dx = rstd * ((g - m1) - xhat * m2)
__device__ __forceinline__ float input_gradient(float g, float xhat, float rstd, float m1,
                                                float m2) {
    return multiply(rstd, subtract(subtract(g, m1), multiply(xhat, m2)));
}

}  // namespace rlk
