// SPDX-License-Identifier: Apache-2.0
// What every RMS norm kernel calls. Steps named as in golden; the gated norm is the plain one
// with an activated gate as a last factor.
#pragma once
#include "rlk/cuda/launch.cuh"
#include "rlk/cuda/rows.cuh"
#include "rlk/math/device_cuda.cuh"
#include "rlk/reduce/row_sum/device_cuda.cuh"

namespace rlk {

// Operands of one call; a plain norm has no gate, a result that is not needed is null.
template <typename T> struct NormArguments {
    Rows<T> dy, x, gate;
    const void* weight;
    long long weight_stride;
    int weight_dtype;
    const float* rstd;
    long long rstd_stride;
    T *y, *dx, *dgate;
    float* rstd_out;
    long long* state;
    double* partial;
    long long rows;
    int columns;
    float eps, weight_offset;
    bool silu;
};

struct Activation {
    float value, derivative;
};

__device__ __forceinline__ float activate(float z, bool is_silu) {
    const float s = sigmoid(z);
    return is_silu ? silu(z, s) : s;
}

__device__ __forceinline__ Activation activate_both(float z, bool is_silu) {
    const float s = sigmoid(z);
    return {is_silu ? silu(z, s) : s, is_silu ? silu_derivative(z, s) : sigmoid_derivative(s)};
}

// 1 / sqrt(sum / N + eps): the one piece of code every RMS norm takes rstd from.
__device__ __forceinline__ float inverse_rms(float sum_of_squares, int columns, float eps) {
    return reciprocal(sqrt(add(divide(sum_of_squares, (float)columns), eps)));
}

// Weight plus offset; an offset of 0 adds nothing, so that -0.0 keeps its sign.
__device__ __forceinline__ void offset_weight(const void* weight, int dtype, long long stride,
                                              float offset, int column, int columns,
                                              float (&out)[ELEMENTS]) {
    load_parameter(weight, dtype, stride, column, columns, out);
    if (offset != 0.0f) {
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) out[i] = add(offset, out[i]);
    }
}

// dx = rstd * (g - xhat * m)
__device__ __forceinline__ float input_gradient(float g, float xhat, float rstd, float m) {
    return multiply(rstd, subtract(g, multiply(xhat, m)));
}

}  // namespace rlk
