// SPDX-License-Identifier: Apache-2.0
// What every RMS norm kernel calls. Steps named as in golden; the gated norm is the plain one
// with an activated gate as a last factor, and a norm of a sum is the plain one of what is stored.
#pragma once
#include "rlk/cuda/launch.cuh"
#include "rlk/cuda/rows.cuh"
#include "rlk/math/table_cuda.cuh"
#include "rlk/reduce/exact_sum/device_round.cuh"
#include "rlk/reduce/exact_sum/window_cuda.cuh"
#include "rlk/reduce/row_sum/block_cuda.cuh"

namespace rlk {

// 1 / sqrt(v), each operation rounded.
struct IeeeRoot {
    static __device__ __forceinline__ float of(float v) { return reciprocal_root(v); }
};

// What sets one norm's kernels apart from another's.
template <bool IS_GATED, bool HAS_RESIDUAL, typename RootOfNorm = IeeeRoot> struct Norm {
    static constexpr bool GATED = IS_GATED, RESIDUAL = HAS_RESIDUAL;
    // Whether there is a tensor of rows beside x, or beside dy and x.
    static constexpr bool BESIDE = GATED || RESIDUAL;
    using Root = RootOfNorm;
};
using Plain = Norm<false, false>;
using Gated = Norm<true, false>;
using WithResidual = Norm<false, true>;

// Operands of one call; a result that is not needed is null. In the backward of a norm of a sum, x
// is the sum.
template <typename T> struct NormArguments {
    // Beside: the gate; or the residual, and in backward the gradient of the sum.
    Rows<T> dy, x, beside;
    const void* weight;
    long long weight_stride;
    int weight_dtype;
    const float* rstd;
    long long rstd_stride;
    T *y, *residual_out, *dx, *dgate;
    float* rstd_out;
    long long* state;  // null if dweight is not needed
    void* sums;
    int form;
    void* workspace;
    Partials partials;  // in the workspace
    long long rows;
    int columns;
    Divisor length;  // columns, as what sums are divided by
    float eps, weight_offset;
    bool silu;

    __device__ __host__ __forceinline__ SumResult result() const {
        return {{state, columns}, sums, weight_dtype, form};
    }
};

// Rows that a lane works on at once. 1 in forward: the next are loaded meanwhile.
constexpr int FORWARD_ROWS = 1;
// 2 in backward: more in flight, and the steps that a row takes once (trees, quotient, barrier) are
// shared.
constexpr int TURN_ROWS = 2;

// Which rows a lane works on: ROWS of them `apart` from each other in a turn.
template <int ROWS> struct Turns {
    long long row;  // the first row of the first turn
    long long apart;
    long long step;  // from one turn to the next
    int of[ROWS];  // turns that have the row; a grid that fills the device leaves few of them

    __device__ __forceinline__ Turns(long long rows, long long row, long long apart,
                                     long long step)
        : row(row), apart(apart), step(step) {
        of[0] = row < rows ? (int)((rows - row - 1) / step) + 1 : 0;
#pragma unroll
        for (int u = 1; u < ROWS; ++u) {
            of[u] = of[0] - (row + u * apart + (of[0] - 1) * step >= rows);
        }
    }
    // Elements to work on, of `count` in a row.
    __device__ __forceinline__ int inside(int turn, int u, int count) const {
        return turn < of[u] ? count : 0;
    }
};

// 1 / sqrt(sum / N + eps): the one piece of code every RMS norm takes rstd from.
template <typename Root>
__device__ __forceinline__ float inverse_rms(float sum_of_squares, Divisor columns, float eps) {
    return Root::of(add(divide(sum_of_squares, columns), eps));
}

// x + residual, rounded once to their dtype: what the norm reads, and what is stored.
template <typename T>
__device__ __forceinline__ Packed<T> rounded_sum(const Packed<T>& x, const Packed<T>& residual) {
    float a[ELEMENTS], b[ELEMENTS];
    unpack(x, a);
    unpack(residual, b);
    Packed<T> sum;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) sum.value[i] = from_float<T>(add(a[i], b[i]));
    return sum;
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
