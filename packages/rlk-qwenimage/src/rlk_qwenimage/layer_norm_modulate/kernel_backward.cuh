// SPDX-License-Identifier: Apache-2.0
// Backward: one read of every token, dx, and the exact dscale and dshift.
#pragma once
#include "rlk_qwenimage/layer_norm_modulate/kernel_forward.cuh"
#include "rlk_qwenimage/layer_norm_modulate/part_sums.cuh"

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
    __device__ __forceinline__ void open(const BackwardToken<T> (&tokens)[TURN], int count) {
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
            float x[ELEMENTS];
            unpack(tokens[u].dout, dout[u]);
            unpack(tokens[u].x, x);
            rstd[u] = tokens[u].rstd;
            normalise(VECTOR, x, tokens[u].mean, rstd[u], count, xhat[u]);
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
    __device__ __forceinline__ void row_sums(const Factors& by, float (&sums)[2 * TURN]) {
        float factors[ELEMENTS];
        by.load(factors);
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
#pragma unroll
            for (int i = 0; i < ELEMENTS; ++i) g[u][i] = multiply(dout[u][i], factors[i]);
            sums[2 * u] = lane_sum(g[u]);
            sums[2 * u + 1] = lane_dot(g[u], xhat[u]);
        }
    }
    // dx, of the quotients of these sums of which a lane has the one `threadIdx.x % (2 * TURN)`.
    template <bool VECTOR>
    __device__ __forceinline__ void store_dx(float own, T* at, int columns, int left,
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

// What a kernel of the backward makes. Of two sums it makes both, whichever is wanted: branches between
// them would keep the steps of a turn apart.
enum class Makes { kAll, kRows, kSums };

// Rows of at most 3072 columns with their sums, of at most 8192 without; or sums alone, of a slice of
// columns of any row, of which blockIdx.y is the number. A thread has 8 columns. Blocks that share
// samples add to `joint` sums; others, whose `joint` has none, finish theirs.
template <typename T, bool VECTOR, int THREADS, Makes MAKES>
__global__ void __launch_bounds__(THREADS, 1)
    backward_wide(const __grid_constant__ Arguments<T> a, const __grid_constant__ Division d,
                  const __grid_constant__ JointSums joint) {
    constexpr bool ROWS = MAKES != Makes::kSums, SUMS = MAKES != Makes::kRows;
    unsigned char* shared = launched_memory<unsigned char>();
    __shared__ ChunkSums<THREADS / 32, 2 * TURN> chunks;
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * ELEMENTS;
    const int count = elements_inside(column, a.columns);
    unsigned char* ring = shared + (SUMS ? 2 * Deeper::bytes(blockDim.x) : 0);
    Units units(d);
    TokenSource<T, VECTOR, THREADS> source(TokenCursor<T>(a, units, column), ring);
    TokenSums<BITS_OF<float>> scale_sums;
    TokenSums<BITS_OF<T>> shift_sums;
    if (SUMS) {
        scale_sums.clear(count);
        shift_sums.clear(count);
        Deeper(shared, 0).clear();
        Deeper(shared, 1).clear();
    }
    __shared__ float4 kept_factors[ROWS ? ELEMENTS / 4 * THREADS : 1];
    const Factors factors{kept_factors + threadIdx.x, THREADS};
    Packed<T> scale;
    if (ROWS && units.inside()) {
        scale = a.scale.template load<T>(units.sample(), column, a.columns);
    }
    if (ROWS) chunks.clear();
    int barrier = 0;
    while (units.inside()) {
        Units next = units;
        next.advance();
        T* dx_at = nullptr;
        if (ROWS) {
            factors.keep(scale);
            // Of the next unit, so that its loads are done when it begins.
            if (next.inside()) {
                scale = a.scale.template load<T>(next.sample(), column, a.columns);
            }
            dx_at = a.dx + (units.sample() * a.tokens + units.token()) * a.columns + column;
        }
        for (int left = units.count(a.tokens); left > 0; left -= TURN) {
            BackwardToken<T> loaded[TURN];
            source.next(loaded);
            Turn<T> turn;
            turn.template open<VECTOR>(loaded, count);
            const int rows = count > 0 ? left : 0;
            if (ROWS) {
                float sums[2 * TURN];
                turn.row_sums(factors, sums);
                chunks.give(barrier, sums);
            }
            // While sums of other warps are on their way.
            if (SUMS) shift_sums.add_turn(turn.dout, rows, shared, 1);
            float own = 0.0f;
            if (ROWS) {
                __syncthreads();
                own = chunks.given(barrier++);
            }
            // While chunks are added up, one after another.
            if (SUMS) {
                float terms[TURN][ELEMENTS];
                turn.scale_terms(terms);
                scale_sums.add_turn(terms, rows, shared, 0);
            }
            if (ROWS) {
                own = divide(own, a.length);
                turn.template store_dx<VECTOR>(own, dx_at, a.columns, left, count);
                dx_at += TURN * a.columns;
            }
        }
        if (SUMS && joint.sums > 0) {
            let_second_pass_start();
            add_part(joint, scale_sums, shift_sums, a.dscale != nullptr, a.dshift != nullptr,
                     shared, units.number / d.parts, units.number % d.parts, column);
            // Blocks that share samples have one unit.
            return;
        }
        if (SUMS) {
            const long long sample = units.sample();
            finish<VECTOR>(a, scale_sums, shared, 0, sample, column, count, a.dscale);
            finish<VECTOR>(a, shift_sums, shared, 1, sample, column, count, a.dshift);
        }
        units.advance();
    }
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
