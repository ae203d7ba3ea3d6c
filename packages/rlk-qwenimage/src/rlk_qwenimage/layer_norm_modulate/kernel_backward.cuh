// SPDX-License-Identifier: Apache-2.0
// Backward: one read of every token, dx, and the exact dscale and dshift.
#pragma once
#include "rlk_qwenimage/layer_norm_modulate/kernel_forward.cuh"
#include "rlk_qwenimage/layer_norm_modulate/token_source.cuh"
#include "rlk_qwenimage/layer_norm_modulate/token_sums.cuh"

namespace rlk {

// Which tokens a block takes: samples `first` on, `count` of them, each in `parts` of `per` tokens.
struct Division {
    long long first, count, parts, per;
};

// g = dout * (1 + scale) and xhat of a lane's columns of one token. Computed anew where it is needed:
// the token as loaded takes fewer registers.
template <typename T>
__device__ __forceinline__ void row_terms(const BackwardToken<T>& token, int count,
                                          const float (&factors)[ELEMENTS], float (&g)[ELEMENTS],
                                          float (&xhat)[ELEMENTS]) {
    float dout[ELEMENTS], x[ELEMENTS];
    unpack(token.dout, dout);
    unpack(token.x, x);
    normalise(x, token.mean, token.rstd, count, xhat);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) g[i] = multiply(dout[i], factors[i]);
}

// dout of a turn's tokens.
template <typename T>
__device__ __forceinline__ void add_to_shift(const BackwardToken<T> (&turn)[TURN],
                                             const TokenRest& rest, long long column,
                                             TokenSums& sums) {
    static_assert(TURN == 2, "a turn's terms are one pair");
    float terms[TURN][ELEMENTS], pair[1][ELEMENTS];
    bool exact = sizeof(T) == 2;
#pragma unroll
    for (int u = 0; u < TURN; ++u) unpack(turn[u].dout, terms[u]);
    // FP32 mostly holds the sum of two narrow terms: as for levels, two subtractions prove it.
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        const float a = terms[0][i], b = terms[1][i], sum = add(a, b);
        pair[0][i] = sum;
        exact &= (subtract(sum, a) == b) & (subtract(sum, b) == a);
    }
    if (exact) {
        sums.add(pair, rest, column);
    } else {
        sums.add(terms, rest, column);
    }
}

// dout * xhat of a turn's tokens.
template <typename T>
__device__ __forceinline__ void add_to_scale(const BackwardToken<T> (&turn)[TURN], int count,
                                             const TokenRest& rest, long long column,
                                             TokenSums& sums) {
    float terms[TURN][ELEMENTS];
#pragma unroll
    for (int u = 0; u < TURN; ++u) {
        float x[ELEMENTS], xhat[ELEMENTS];
        unpack(turn[u].dout, terms[u]);
        unpack(turn[u].x, x);
        normalise(x, turn[u].mean, turn[u].rstd, count, xhat);
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) terms[u][i] = multiply(terms[u][i], xhat[i]);
    }
    sums.add(terms, rest, column);
}

// dx of a turn's tokens. Whole blocks call.
template <bool VECTOR, typename T, int CHUNKS>
__device__ __forceinline__ void store_dx(const Arguments<T>& a, const BackwardToken<T> (&turn)[TURN],
                                         const float (&factors)[ELEMENTS],
                                         ChunkSums<CHUNKS, 2 * TURN>& chunks, int barrier, T* at,
                                         long long left, int count) {
    float sums[2 * TURN];  // of g, then of g * xhat, for each token
#pragma unroll
    for (int u = 0; u < TURN; ++u) {
        float g[ELEMENTS], xhat[ELEMENTS];
        row_terms(turn[u], count, factors, g, xhat);
        sums[2 * u] = lane_sum(g);
        sums[2 * u + 1] = lane_dot(g, xhat);
    }
    // A lane has the sum `threadIdx.x % (2 * TURN)` of them.
    const float own = divide(chunks.total(barrier, sums), a.length);
#pragma unroll
    for (int u = 0; u < TURN; ++u) {
        const float m1 = __shfl_sync(0xffffffffu, own, 2 * u);
        const float m2 = __shfl_sync(0xffffffffu, own, 2 * u + 1);
        float g[ELEMENTS], xhat[ELEMENTS], dx[ELEMENTS];
        row_terms(turn[u], count, factors, g, xhat);
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) {
            dx[i] = input_gradient(g[i], xhat[i], turn[u].rstd, m1, m2);
        }
        store<VECTOR>(at + u * a.columns, u < left ? count : 0, dx);
    }
}

// Rows of at most 3072 columns with their sums, of at most 8192 without; or, where dx is not wanted,
// a slice of columns of any row, of which blockIdx.y is the number. A thread has 8 columns.
template <typename T, bool VECTOR, int THREADS, bool SUMS>
__global__ void __launch_bounds__(THREADS, 1)
    backward_wide(Arguments<T> a, Division d, SumTarget<T> to_scale, SumTarget<T> to_shift) {
    extern __shared__ __align__(16) double shared[];
    __shared__ ChunkSums<THREADS / 32, 2 * TURN> chunks;
    const int slice = blockIdx.y * blockDim.x * ELEMENTS;
    const int column = slice + threadIdx.x * ELEMENTS;
    const int count = elements_inside(column, a.columns);
    double* deeper = shared;
    double* ring = shared + (SUMS ? 2 * TokenSums::doubles(blockDim.x) : 0);
    chunks.clear();
    int barrier = 0;
    for (long long unit = blockIdx.x; unit < d.count * d.parts; unit += gridDim.x) {
        const long long place = unit / d.parts, sample = d.first + place;
        const long long token = (unit - place * d.parts) * d.per;
        const long long tokens = a.tokens - token < d.per ? a.tokens - token : d.per;
        float factors[ELEMENTS];
        factor<T>(a.scale, sample, column, a.columns, factors);
        TokenSums scale_sums, shift_sums;
        uint32_t scale_marks = 0, shift_marks = 0;
        const long long sum_column = place * a.columns + column;
        const TokenRest scale_rest{to_scale.state, sum_column, &scale_marks};
        const TokenRest shift_rest{to_shift.state, sum_column, &shift_marks};
        if (SUMS) {
            scale_sums.clear(deeper, blockDim.x);
            shift_sums.clear(deeper + TokenSums::doubles(blockDim.x), blockDim.x);
        }
        TokenSource<T, VECTOR, THREADS> source(
            TokenCursor<T>(a, sample, token, tokens, column), ring);
        T* dx_at = a.dx + (sample * a.tokens + token) * a.columns + column;
        for (long long left = tokens; left > 0; left -= TURN) {
            BackwardToken<T> turn[TURN];
            source.next(turn);
            if (SUMS && count > 0) {
                if (to_shift.out != nullptr) {
                    add_to_shift(turn, shift_rest, sum_column, shift_sums);
                }
                if (to_scale.out != nullptr) {
                    add_to_scale(turn, count, scale_rest, sum_column, scale_sums);
                }
            }
            if (a.dx != nullptr) {
                store_dx<VECTOR>(a, turn, factors, chunks, barrier++, dx_at, left, count);
                dx_at += TURN * a.columns;
            }
        }
        if (!SUMS) continue;
        const long long first = place * a.columns + slice;
        if (to_scale.state.data != nullptr) {
            scale_sums.flush_block(to_scale.state, first, a.columns - slice, ring);
        } else if (to_scale.out != nullptr) {
            finish<VECTOR>(a, scale_sums, scale_marks, sample, column, count, true, to_scale.out);
        }
        if (to_shift.state.data != nullptr) {
            shift_sums.flush_block(to_shift.state, first, a.columns - slice, ring);
        } else if (to_shift.out != nullptr) {
            finish<VECTOR>(a, shift_sums, shift_marks, sample, column, count, false, to_shift.out);
        }
    }
}

// Longer rows: dx only; their sums come from slices in `backward_wide`.
template <typename T>
__global__ void __launch_bounds__(WIDE_WARPS * 32) backward_long(Arguments<T> a) {
    extern __shared__ float long_sums[];  // [chunks]
    const long long rows = a.samples * a.tokens;
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const Place place(row, a.tokens);
        const Rows<T> upstream = a.dout.of(place.sample), tokens = a.x.of(place.sample);
        const float mean = a.mean.of(place.sample)[place.token * a.mean.token_stride];
        const float rstd = a.rstd.of(place.sample)[place.token * a.rstd.token_stride];
        const auto terms = [&](int column, int count, float (&g)[ELEMENTS],
                               float (&xhat)[ELEMENTS]) {
            float x[ELEMENTS], dout[ELEMENTS], factors[ELEMENTS];
            unpack(load_long(upstream, place.token, column, count), dout);
            unpack(load_long(tokens, place.token, column, count), x);
            factor<T>(a.scale, place.sample, column, a.columns, factors);
            normalise(x, mean, rstd, count, xhat);
#pragma unroll
            for (int i = 0; i < ELEMENTS; ++i) g[i] = multiply(dout[i], factors[i]);
        };
        float g[ELEMENTS], xhat[ELEMENTS], dx[ELEMENTS];
        const float m1 = divide(sum_long(long_sums, a.columns, [&](int column, int count) {
            terms(column, count, g, xhat);
            return lane_sum(g);
        }), a.length);
        const float m2 = divide(sum_long(long_sums, a.columns, [&](int column, int count) {
            terms(column, count, g, xhat);
            return lane_dot(g, xhat);
        }), a.length);
        for (int column = threadIdx.x * ELEMENTS; column < a.columns;
             column += blockDim.x * ELEMENTS) {
            const int count = elements_inside(column, a.columns);
            terms(column, count, g, xhat);
#pragma unroll
            for (int i = 0; i < ELEMENTS; ++i) {
                dx[i] = input_gradient(g[i], xhat[i], rstd, m1, m2);
            }
            store<false>(a.dx + row * a.columns + column, count, dx);
        }
    }
}

}  // namespace rlk
