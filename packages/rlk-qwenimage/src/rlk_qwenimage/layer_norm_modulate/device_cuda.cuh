// SPDX-License-Identifier: Apache-2.0
// What the kernels call. Steps named as in golden.
#pragma once
#include "rlk/cuda/rows.cuh"
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
    __device__ __forceinline__ void load(long long sample, int column, int columns,
                                         float (&out)[ELEMENTS]) const {
        const T* row = static_cast<const T*>(data) + sample * sample_stride;
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) {
            const long long at = (long long)(column + i) * column_stride;
            out[i] = column + i < columns ? to_float(row[at]) : 0.0f;
        }
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

// 2: tokens that a block works on at once: more in flight, and the steps that a token takes once
// (trees, root, barrier) are shared.
constexpr int TURN = 2;
// 32 warps of one chunk each: the longest row whose values stay in registers.
constexpr int WIDE_WARPS = 32;

// 1 + scale of a lane's columns.
template <typename T>
__device__ __forceinline__ void factor(const Modulation& scale, long long sample, int column,
                                       int columns, float (&out)[ELEMENTS]) {
    scale.template load<T>(sample, column, columns, out);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) out[i] = add(1.0f, out[i]);
}

// x - mean of `count` elements; beyond the row 0 - mean would be a term.
__device__ __forceinline__ void centre(const float (&x)[ELEMENTS], float mean, int count,
                                       float (&out)[ELEMENTS]) {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) out[i] = i < count ? subtract(x[i], mean) : 0.0f;
}

// (x - mean) * rstd of `count` elements; zero beyond the row, where an infinite rstd makes NaN.
__device__ __forceinline__ void normalise(const float (&x)[ELEMENTS], float mean, float rstd,
                                          int count, float (&out)[ELEMENTS]) {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        out[i] = i < count ? multiply(subtract(x[i], mean), rstd) : 0.0f;
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
