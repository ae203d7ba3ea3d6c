// SPDX-License-Identifier: Apache-2.0
// The exact sums over a sample's tokens: by a block that has all of them, or by several and a state.
#pragma once
#include "rlk/reduce/exact_sum/window_cuda.cuh"
#include "rlk_qwenimage/layer_norm_modulate/device_cuda.cuh"

namespace rlk {

// What fits no level of a block's sums: added to the state, or, where the block finishes the sums
// itself, a mark on the thread's column, which is then summed again in integers.
struct TokenRest {
    ExactState state;  // data is null where the block finishes
    long long first;   // the thread's first column
    uint32_t* marks;

    __device__ __forceinline__ void mark(long long column) const {
        *marks |= 1u << (int)(column - first);
    }
    __device__ __forceinline__ void add_exact(long long column, double value) const {
        if (state.data != nullptr) state.add_exact(column, value);
        else mark(column);
    }
    __device__ __forceinline__ void count_special(long long column, float value) const {
        if (state.data != nullptr) state.count_special(column, value);
        else mark(column);
    }
};

// Sums by windows, of which a block has one set after another. A turn's terms are tested together,
// by integers: chains of predicates would be waited for.
struct TokenSums : WindowSums<ELEMENTS, TokenRest> {
    using Window = WindowSums<ELEMENTS, TokenRest>;
    using Terms = float[TURN][ELEMENTS];

    bool deep;  // deeper levels hold something

    __device__ __forceinline__ void clear(double* shared, int block_threads) {
        Window::clear(shared, block_threads);
        deep = false;
    }
    // For the next sums, which begin with the window of these: samples are mostly of one scale.
    __device__ __forceinline__ void restart() {
        for (int i = 0; i < (LEVELS - 1) * ELEMENTS && deep; ++i) deeper[i * threads] = 0.0;
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) level[i] = 0.0;
        deep = false;
    }
    // The first `rows` rows of terms; others are zeros.
    __device__ __forceinline__ void add_turn(const Terms& terms, int rows, const TokenRest& lost,
                                             long long column) {
        if (left < TURN) look();
        if (left >= TURN && (takes_all(terms, rows) || takes_or_zero(terms))) {
#pragma unroll
            for (int u = 0; u < TURN; ++u) {
#pragma unroll
                for (int i = 0; i < ELEMENTS; ++i) {
                    level[i] = __dadd_rn(level[i], (double)terms[u][i]);
                }
            }
            left -= TURN;
            return;
        }
        Values<TURN * ELEMENTS> values;
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
#pragma unroll
            for (int i = 0; i < ELEMENTS; ++i) values.at[u * ELEMENTS + i] = terms[u][i];
        }
        // Copies in memory: what a call takes or returns in registers would be moved on other paths.
        TokenSums sums = *this;
        sift_turn(sums, values, rows, lost, column);
        *this = sums;
    }
    // Whether the first level has room for more terms; by upper halves, which order magnitudes.
    __device__ __forceinline__ void look() {
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) largest = max(largest, magnitude(level[i]));
        if (largest < magnitude(__dmul_rn((double)most, ROOM))) left = TAKEN;
    }
    __device__ __forceinline__ static uint32_t magnitude(double value) {
        return (uint32_t)((unsigned long long)__double_as_longlong(value) >> 32) << 1;
    }
    // `takes` of all terms: twice a pattern has no sign, and orders magnitudes.
    __device__ __forceinline__ bool takes_all(const Terms& terms, int rows) const {
        const uint32_t low = __float_as_uint(least) << 1, range = (__float_as_uint(most) << 1) - low;
        uint32_t farthest = 0;
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
            uint32_t far = 0;
#pragma unroll
            for (int i = 0; i < ELEMENTS; ++i) {
                far = max(far, (__float_as_uint(terms[u][i]) << 1) - low);
            }
            farthest = u < rows ? max(farthest, far) : farthest;
        }
        return farthest < range;
    }
    // Zeros may be added too; most rows have none to test for.
    __device__ __forceinline__ bool takes_or_zero(const Terms& terms) const {
        bool all = true;
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
#pragma unroll
            for (int i = 0; i < ELEMENTS; ++i) all &= takes(terms[u][i]) | (terms[u][i] == 0.0f);
        }
        return all;
    }
    static __device__ __noinline__ void sift_turn(TokenSums& sums, const Values<TURN * ELEMENTS>& terms,
                                                  int rows, const TokenRest& lost, long long column) {
        Window& window = sums;
        for (int u = 0; u < rows; ++u) {
            window.template make_room<1>(lost, column);
            Values<ELEMENTS> row;
            for (int i = 0; i < ELEMENTS; ++i) row.at[i] = terms.at[u * ELEMENTS + i];
            window = Window::sifted(window, row, lost, column);
            --window.left;
        }
        sums.deep = sums.is_deep();
    }
};

// Where the sums of one of dscale and dshift go: rounded to `out` by the block itself, or to the
// state of a group of samples, of which this one begins at `first`.
template <typename T> struct SumTarget {
    T* out;            // [T, N]; null if not needed
    ExactState state;  // [13, samples of the group * N]; data is null where a block finishes
};

// The pattern of one column's sum in integers: `term(token)` for each of its tokens.
template <typename T, typename Term>
__device__ __forceinline__ T sum_in_integers(long long tokens, Term term) {
    long long limb[LIMBS] = {0};
    Specials seen{false, false, false};
    for (long long token = 0; token < tokens; ++token) {
        const float value = term(token);
        if (!isfinite(value)) {
            seen.count(value);
            continue;
        }
        split_exact((double)value, [&](int i, long long piece) { limb[i] += piece; });
    }
    return from_bits<T>(round_column(limb, seen, format_of(dtype_of<T>())));
}

// One column of dscale or dshift again, from memory.
template <typename T>
__device__ __noinline__ T sum_column_again(const Arguments<T>& a, long long sample, int column,
                                           bool of_scale) {
    const Rows<T> dout = a.dout.of(sample), x = a.x.of(sample);
    const float *mean = a.mean.of(sample), *rstd = a.rstd.of(sample);
    return sum_in_integers<T>(a.tokens, [&](long long token) {
        const float upstream =
            to_float(dout.data[token * dout.row_stride + column * dout.column_stride]);
        if (!of_scale) return upstream;
        const float value = to_float(x.data[token * x.row_stride + column * x.column_stride]);
        const float centred = subtract(value, mean[token * a.mean.token_stride]);
        return multiply(upstream, multiply(centred, rstd[token * a.rstd.token_stride]));
    });
}

// The sum of all levels of a column.
template <typename T>
__device__ __noinline__ T round_levels(double first, double second, double third) {
    long long limb[LIMBS] = {0};
    const auto add = [&](int i, long long piece) { limb[i] += piece; };
    split_exact(first, add);
    split_exact(second, add);
    split_exact(third, add);
    return from_bits<T>(round_column(limb, {false, false, false}, format_of(dtype_of<T>())));
}

// A block had all tokens of a sample: its sums are finished, and rounded. 8 columns of a thread.
template <bool VECTOR, typename T>
__device__ __forceinline__ void finish(const Arguments<T>& a, const TokenSums& sums, uint32_t marks,
                                       long long sample, int column, int count, bool of_scale,
                                       T* out) {
    if (count <= 0) return;
    static_assert(LEVELS == 3, "round_levels takes all levels");
    Packed<T> rounded;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        if (marks >> i & 1) {
            rounded.value[i] = sum_column_again(a, sample, column + i, of_scale);
        } else if (sums.deep) {
            rounded.value[i] = round_levels<T>(sums.level[i], sums.at(1, i), sums.at(2, i));
        } else {
            rounded.value[i] = round_double<T>(sums.level[i]);
        }
    }
    T* at = out + sample * a.columns + column;
    if (VECTOR) {
        const uint4* words = reinterpret_cast<const uint4*>(&rounded);
#pragma unroll
        for (int w = 0; w < Packed<T>::WORDS; ++w) reinterpret_cast<uint4*>(at)[w] = words[w];
    } else {
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) {
            if (i < count) at[i] = rounded.value[i];
        }
    }
}

}  // namespace rlk
