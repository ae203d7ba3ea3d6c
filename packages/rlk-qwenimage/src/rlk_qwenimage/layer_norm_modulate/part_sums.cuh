// SPDX-License-Identifier: Apache-2.0
// The exact sums of samples that several blocks share: what a block adds of its part of the tokens,
// and the passes before and after, which write zeros and round.
// check_ptx: allow atom.global.add.f64 (exact, or the column is summed again: no order can matter)
#pragma once
#include "rlk/cuda/early.cuh"
#include "rlk_qwenimage/layer_norm_modulate/token_source.cuh"
#include "rlk_qwenimage/layer_norm_modulate/token_sums.cuh"

namespace rlk {

// The sums of shared samples that all blocks add to, in two levels: what an addition to the first
// loses, exactly, goes to the second. So both together are the sum whatever the order was, or the
// second one, which has lost something, is a NaN: such a column is summed again. An infinity or a
// NaN among the terms is in the first level.
struct JointSums {
    double* levels;  // [samples][sums][LEVELS][columns]
    long long columns;
    int sums;

    static constexpr int LEVELS = 2;

    // Whole chunks, in each of which column i of lane l stands at place 32 * i + l, so that warps
    // add to neighbours.
    static long long padded(long long columns) { return (columns + CHUNK - 1) / CHUNK * CHUNK; }
    static long long doubles(long long samples, long long columns, int sums) {
        return samples * sums * LEVELS * padded(columns);
    }
    JointSums(void* workspace, long long columns, int sums)
        : levels(static_cast<double*>(workspace)), columns(padded(columns)), sums(sums) {}
    // The first level; the second one is `columns` further.
    __device__ __forceinline__ double* at(int sample, int sum, int place) const {
        return levels + ((long long)sample * sums + sum) * LEVELS * columns + place;
    }
};

// 1024 threads, of 4 doubles each: few blocks, so that most processors are free for the first pass.
constexpr int ZERO_THREADS = 1024, ZERO_STORES = 4;

// Before blocks add, which may come up at once.
__global__ void __launch_bounds__(ZERO_THREADS) zero_sums(double* levels, long long count) {
    let_second_pass_start();
    const long long first = (long long)blockIdx.x * ZERO_THREADS * ZERO_STORES + threadIdx.x;
#pragma unroll
    for (int k = 0; k < ZERO_STORES; ++k) {
        const long long at = first + k * ZERO_THREADS;
        if (at < count) levels[at] = 0.0;
    }
}

// What a block adds of both sums of a thread's columns, and what stood there before; `at` is null
// where a sum is not wanted.
struct Addition {
    static constexpr int TERMS = 2 * ELEMENTS;

    double term[2][ELEMENTS], before[2][ELEMENTS];
    double* at[2];

    // One sum, if it is wanted; what a block found that is not finite, in place of its first level.
    template <int BITS>
    __device__ __forceinline__ void take(int sum, const TokenSums<BITS>& sums, Found found) {
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) term[sum][i] = sums.level[i];
        if (found.bits == 0) return;
        const float infinity = __uint_as_float(0x7f800000u);
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) {
            const float special = subtract(found.plus(i) ? infinity : 0.0f,
                                           found.minus(i) ? infinity : 0.0f);
            if (found.special(i)) term[sum][i] = (double)special;
        }
    }
    // To the first levels, all on their way together. Blocks of other `part` begin elsewhere, so that
    // few of them meet.
    template <int FIRST = 0> __device__ __forceinline__ void add(int part) {
        constexpr int STEP = 2;
        if constexpr (FIRST + STEP < TERMS) {
            if (part % (TERMS / STEP) != FIRST / STEP) return add<FIRST + STEP>(part);
        }
#pragma unroll
        for (int k = 0; k < TERMS; ++k) {
            const int sum = (k + FIRST) % TERMS / ELEMENTS, i = (k + FIRST) % ELEMENTS;
            before[sum][i] = 0.0;
            if (at[sum] != nullptr) before[sum][i] = atomicAdd(at[sum] + 32 * i, term[sum][i]);
        }
    }
    // Whether the first levels took all of a sum: what was larger, term or what stood there, comes
    // back from the rounded sum less the other one only if nothing was rounded away. By integers, as
    // all is tested together; a NaN is none.
    __device__ __forceinline__ bool held(int sum) const {
        long long differ = 0;
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) {
            const double a = before[sum][i], b = term[sum][i], both = __dadd_rn(a, b);
            differ |= __double_as_longlong(__dsub_rn(both, a)) ^ __double_as_longlong(b);
            differ |= __double_as_longlong(__dsub_rn(both, b)) ^ __double_as_longlong(a);
        }
        return differ == 0;
    }
};

struct Columns {
    double at[ELEMENTS];
};

// What the first levels of a thread's columns did not take of a sum, to the second ones, at `at`.
static __device__ __noinline__ void add_rest(double* at, const Columns& before,
                                             const Columns& term, const Deeper& deeper) {
    const double lost = (double)__uint_as_float(0x7fc00000u);
    const Found found = *deeper.found;
    double rest[ELEMENTS], stood[ELEMENTS];
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        double error, more;
        // A NaN where the sum is not finite: the first level says it all.
        two_sum(before.at[i], term.at[i], error);
        rest[i] = two_sum(error, deeper.at(1, i), more);
        static_assert(LEVELS == JointSums::LEVELS + 1, "one level of a block has no place");
        if (more != 0.0 || deeper.at(2, i) != 0.0 || found.lost(i)) rest[i] = lost;
    }
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        stood[i] = rest[i] != 0.0 ? atomicAdd(at + 32 * i, rest[i]) : 0.0;
    }
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        double error;
        two_sum(stood[i], rest[i], error);
        if (error != 0.0) atomicAdd(at + 32 * i, lost);
    }
}

// Add both sums of a block, which is number `part` of those of sample number `of`; `column` is the
// thread's first.
template <int SCALE_BITS, int SHIFT_BITS>
__device__ __forceinline__ void add_part(const JointSums& to, const TokenSums<SCALE_BITS>& scale,
                                         const TokenSums<SHIFT_BITS>& shift, bool of_scale,
                                         bool of_shift, void* shared, int of, int part,
                                         int column) {
    // The last slice of columns may have warps without any.
    if (column >= to.columns) return;
    const int place = column / CHUNK * CHUNK + threadIdx.x % 32;
    Addition addition;
    addition.at[0] = of_scale ? to.at(of, 0, place) : nullptr;
    addition.at[1] = of_shift ? to.at(of, to.sums - 1, place) : nullptr;
    addition.take(0, scale, *Deeper(shared, 0).found);
    addition.take(1, shift, *Deeper(shared, 1).found);
    // Until all is zero.
    wait_for_first_pass();
    addition.add(part);
#pragma unroll
    for (int sum = 0; sum < 2; ++sum) {
        const Deeper deeper(shared, sum);
        if (addition.at[sum] == nullptr) continue;
        if (deeper.found->bits == 0 && addition.held(sum)) continue;
        // Copies in memory, as in `add_turn`.
        Columns before, term;
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) {
            before.at[i] = addition.before[sum][i];
            term.at[i] = addition.term[sum][i];
        }
        add_rest(addition.at[sum] + to.columns, before, term, deeper);
    }
}

// 8: warps of a block that rounds as many columns as a warp has lanes; where columns are summed
// again, each takes some of the tokens.
constexpr int COMBINE_WARPS = 8;
// 8: terms of a thread that are on their way together.
constexpr int AGAIN_LOADS = 8;

// One column again, from memory, by a thread of each warp. `state` is in shared memory, zeros.
template <typename T>
__device__ __noinline__ void add_again(const Arguments<T>& a, bool of_scale, long long sample,
                                       int column, ExactState state) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (long long first = warp; first < a.tokens; first += COMBINE_WARPS * AGAIN_LOADS) {
        float terms[AGAIN_LOADS];
#pragma unroll
        for (int k = 0; k < AGAIN_LOADS; ++k) {
            const long long token = first + k * COMBINE_WARPS;
            terms[k] = token < a.tokens ? sum_term(a, sample, token, column, of_scale) : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < AGAIN_LOADS; ++k) state.add_exact(lane, (double)terms[k]);
    }
}

// dscale and dshift of shared samples, from `first` on: blockIdx.x numbers 32 places, blockIdx.y the
// sums of samples.
template <typename T>
__global__ void __launch_bounds__(COMBINE_WARPS * 32)
    round_sums(const __grid_constant__ Arguments<T> a, const __grid_constant__ JointSums joint,
               long long first) {
    __shared__ long long digits[STATE_ROWS * 32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int place = blockIdx.x * 32 + lane;
    const int column = place / CHUNK * CHUNK + lane * ELEMENTS + place % CHUNK / 32;
    const int of = blockIdx.y / joint.sums, sum = blockIdx.y % joint.sums;
    const bool of_scale = a.dscale != nullptr && sum == 0;
    const long long sample = first + of;
    T* out = of_scale ? a.dscale : a.dshift;
    const ExactState state{digits, 32};
    for (int i = threadIdx.x; i < STATE_ROWS * 32; i += COMBINE_WARPS * 32) digits[i] = 0;
    wait_for_first_pass();
    const double* at = joint.at(of, sum, place);
    PairOfDoubles total;
    total.high = at[0];
    total.low = at[joint.columns];
    const bool finite = isfinite(total.high), held = finite && isfinite(total.low);
    const bool inside = column < a.columns;
    if (warp == 0 && held && inside) {
        out[sample * a.columns + column] = round_double<T>(total.to_odd());
    }
    // What two doubles do not hold: by all warps.
    const bool again = !held && inside;
    if (!__syncthreads_or(again)) return;
    if (again && finite) add_again(a, of_scale, sample, column, state);
    if (again && !finite && warp == 0) state.count_special(lane, (float)total.high);
    __syncthreads();
    if (!again || warp > 0) return;
    finish_state(state, lane, column,
                 {{}, out + sample * a.columns, dtype_of<T>(), kRounded});
}

}  // namespace rlk
