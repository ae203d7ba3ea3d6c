// SPDX-License-Identifier: Apache-2.0
// Backward: one read of every token, dx, and the exact dscale and dshift.
#pragma once
#include "rlk/cuda/early.cuh"
#include "rlk/reduce/exact_sum/kernel_round.cuh"
#include "rlk_qwenimage/layer_norm_modulate/kernel_forward.cuh"
#include "rlk_qwenimage/layer_norm_modulate/token_source.cuh"
#include "rlk_qwenimage/layer_norm_modulate/token_sums.cuh"

namespace rlk {

// 1 + scale of a thread's columns, in shared memory: registers have no room for them.
struct Factors {
    float4* at;  // [2][threads], this thread's
    int threads;

    template <typename T> __device__ __forceinline__ void keep(const Packed<T>& scale) const {
        float factors[ELEMENTS];
        factor<T>(scale, factors);
        at[0] = make_float4(factors[0], factors[1], factors[2], factors[3]);
        at[threads] = make_float4(factors[4], factors[5], factors[6], factors[7]);
    }
    __device__ __forceinline__ void load(float (&factors)[ELEMENTS]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float4 four = at[i * threads];
            factors[4 * i] = four.x;
            factors[4 * i + 1] = four.y;
            factors[4 * i + 2] = four.z;
            factors[4 * i + 3] = four.w;
        }
    }
};

// A turn's tokens as they are worked on.
template <typename T> struct Turn {
    float dout[TURN][ELEMENTS], xhat[TURN][ELEMENTS], g[TURN][ELEMENTS], rstd[TURN];

    template <bool VECTOR>
    __device__ __forceinline__ void open(const BackwardToken<T> (&tokens)[TURN], int count,
                                         const Factors& by) {
        float factors[ELEMENTS];
        by.load(factors);
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
            float x[ELEMENTS];
            unpack(tokens[u].dout, dout[u]);
            unpack(tokens[u].x, x);
            rstd[u] = tokens[u].rstd;
            normalise(VECTOR, x, tokens[u].mean, rstd[u], count, xhat[u]);
#pragma unroll
            for (int i = 0; i < ELEMENTS; ++i) g[u][i] = multiply(dout[u][i], factors[i]);
        }
    }
    // dout * xhat
    __device__ __forceinline__ void scale_terms(float (&terms)[TURN][ELEMENTS]) const {
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
#pragma unroll
            for (int i = 0; i < ELEMENTS; ++i) terms[u][i] = multiply(dout[u][i], xhat[u][i]);
        }
    }
    // The sum of g, then that of g * xhat, for each token.
    __device__ __forceinline__ void row_sums(float (&sums)[2 * TURN]) const {
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
            sums[2 * u] = lane_sum(g[u]);
            sums[2 * u + 1] = lane_dot(g[u], xhat[u]);
        }
    }
    // dx, of the quotients of these sums of which a lane has the one `threadIdx.x % (2 * TURN)`.
    template <bool VECTOR>
    __device__ __forceinline__ void store_dx(float own, T* at, int columns, long long left,
                                             int count) const {
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
            const float m1 = __shfl_sync(0xffffffffu, own, 2 * u);
            const float m2 = __shfl_sync(0xffffffffu, own, 2 * u + 1);
            float dx[ELEMENTS];
#pragma unroll
            for (int i = 0; i < ELEMENTS; ++i) {
                dx[i] = input_gradient(g[u][i], xhat[u][i], rstd[u], m1, m2);
            }
            store<VECTOR>(at + u * columns, u < left ? count : 0, dx);
        }
    }
};

// Rows of at most 3072 columns with their sums, of at most 8192 without; or, where dx is not wanted,
// a slice of columns of any row, of which blockIdx.y is the number. A thread has 8 columns.
template <typename T, bool VECTOR, int THREADS, bool SUMS>
__global__ void __launch_bounds__(THREADS, 1)
    backward_wide(const __grid_constant__ Arguments<T> a, const __grid_constant__ Division d,
                  const __grid_constant__ SumTarget<T> to_scale,
                  const __grid_constant__ SumTarget<T> to_shift) {
    double* shared = launched_memory<double>();
    __shared__ ChunkSums<THREADS / 32, 2 * TURN> chunks;
    const int slice = blockIdx.y * blockDim.x * ELEMENTS;
    const int column = slice + threadIdx.x * ELEMENTS;
    const int count = elements_inside(column, a.columns);
    double* ring = shared + (SUMS ? 2 * TokenSums::doubles(blockDim.x) : 0);
    Units units(d);
    TokenSource<T, VECTOR, THREADS> source(TokenCursor<T>(a, units, column), ring);
    TokenSums scale_sums, shift_sums;
    if (SUMS) {
        scale_sums.clear(shared, blockDim.x);
        shift_sums.clear(shared + TokenSums::doubles(blockDim.x), blockDim.x);
    }
    __shared__ float4 kept_factors[ELEMENTS / 4 * THREADS];
    const Factors factors{kept_factors + threadIdx.x, THREADS};
    // States are zeros from here on.
    if (SUMS) wait_for_first_pass();
    Packed<T> scale;
    if (units.inside()) scale = a.scale.template load<T>(units.sample(), column, a.columns);
    chunks.clear();
    int barrier = 0;
    while (units.inside()) {
        const long long place = units.place, sample = units.sample(), token = units.token();
        const long long tokens = units.count(a.tokens);
        factors.keep(scale);
        // Of the next unit, so that its loads are done when it begins.
        Units next = units;
        next.advance();
        if (next.inside()) scale = a.scale.template load<T>(next.sample(), column, a.columns);
        uint32_t scale_marks = 0, shift_marks = 0;
        const long long sum_column = place * a.columns + column;
        const TokenRest scale_rest{to_scale.state, sum_column, &scale_marks};
        const TokenRest shift_rest{to_shift.state, sum_column, &shift_marks};
        T* dx_at = a.dx + (sample * a.tokens + token) * a.columns + column;
        for (long long left = tokens; left > 0; left -= TURN) {
            BackwardToken<T> loaded[TURN];
            source.next(loaded);
            Turn<T> turn;
            turn.template open<VECTOR>(loaded, count, factors);
            if (a.dx != nullptr) {
                float sums[2 * TURN];
                turn.row_sums(sums);
                chunks.give(barrier, sums);
            }
            // While sums of other warps are on their way.
            if (SUMS && count > 0) {
                const int rows = left < TURN ? (int)left : TURN;
                if (to_shift.out != nullptr) {
                    shift_sums.add_turn(turn.dout, rows, shift_rest, sum_column);
                }
                if (to_scale.out != nullptr) {
                    float terms[TURN][ELEMENTS];
                    turn.scale_terms(terms);
                    scale_sums.add_turn(terms, rows, scale_rest, sum_column);
                }
            }
            if (a.dx != nullptr) {
                __syncthreads();
                const float own = divide(chunks.given(barrier++), a.length);
                turn.template store_dx<VECTOR>(own, dx_at, a.columns, left, count);
                dx_at += TURN * a.columns;
            }
        }
        if (!SUMS) {
            units.advance();
            continue;
        }
        const long long first = place * a.columns + slice;
        // Blocks that share samples have one unit: the ring is empty.
        if (to_scale.state.data != nullptr || to_shift.state.data != nullptr) {
            let_second_pass_start();
        }
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
        scale_sums.restart();
        shift_sums.restart();
        units.advance();
    }
}

// 64: columns of a block of `zero_states` and `round_states`, whose time is that of a few loads.
constexpr int STATE_THREADS = 64;

// States of both sums before blocks add to them; blockIdx.y numbers the sum.
template <typename T>
__global__ void __launch_bounds__(STATE_THREADS)
    zero_states(SumTarget<T> to_scale, SumTarget<T> to_shift) {
    let_second_pass_start();
    const ExactState state = (blockIdx.y == 0 ? to_scale : to_shift).state;
    const long long column = (long long)blockIdx.x * STATE_THREADS + threadIdx.x;
    if (state.data == nullptr || column >= state.columns) return;
#pragma unroll
    for (int i = 0; i < STATE_ROWS; ++i) state.data[i * state.columns + column] = 0;
}

// And after: dscale and dshift of samples that begin at element `first`.
template <typename T>
__global__ void __launch_bounds__(STATE_THREADS)
    round_states(SumTarget<T> to_scale, SumTarget<T> to_shift, long long first) {
    wait_for_first_pass();
    const SumTarget<T> target = blockIdx.y == 0 ? to_scale : to_shift;
    const long long column = (long long)blockIdx.x * STATE_THREADS + threadIdx.x;
    if (target.state.data == nullptr || column >= target.state.columns) return;
    const SumResult rounded{{}, target.out + first, dtype_of<T>(), kRounded};
    finish_state(target.state, column, column, rounded);
}

// Longer rows: dx only; their sums come from slices in `backward_wide`.
template <typename T>
__global__ void __launch_bounds__(WIDE_WARPS * 32) backward_long(Arguments<T> a) {
    float* long_sums = launched_memory<float>();  // [chunks]
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
            factor<T>(a.scale.template load<T>(place.sample, column, a.columns), factors);
            normalise(false, x, mean, rstd, count, xhat);
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
