// SPDX-License-Identifier: Apache-2.0
// The exact sums of samples that several blocks share: what a block adds of its part of the tokens,
// and the passes before and after, which write zeros and round.
// check_ptx: allow atom.global.add.f64 (exact, or the column is summed again: no order can matter)
#pragma once
#include "rlk/cuda/zeros.cuh"
#include "rlk_qwenimage/layer_norm_modulate/token_source.cuh"
#include "rlk_qwenimage/layer_norm_modulate/token_sums.cuh"

namespace rlk {

// The sums of shared samples that all blocks add to, in two levels: what an addition to the first
// loses, exactly, goes to the second. So both together are the sum whatever the order was, or the
// second one, which has lost something, is a NaN: such a column is summed again. An infinity or a
// NaN among the terms is in the first level.
//
// One address takes one addition at a time: where many blocks share a sample, each adds to one of
// `copies`, all of which are zero at first.
struct JointSums {
    double* levels;  // [samples][copies][sums][LEVELS][columns]
    long long columns;
    int sums, copies;

    static constexpr int LEVELS = 2, MOST_COPIES = 4;
    // 64: blocks whose additions to one address take longer than to add up copies.
    static int copies_of(long long parts) { return parts > 64 ? MOST_COPIES : 1; }
    static_assert((MOST_COPIES & (MOST_COPIES - 1)) == 0, "a copy is some bits of a part");

    // Whole chunks, in each of which column i of lane l stands at place 32 * i + l, so that warps
    // add to neighbours.
    static long long padded(long long columns) { return (columns + CHUNK - 1) / CHUNK * CHUNK; }
    JointSums(void* workspace, long long columns, int sums, long long parts)
        : levels(static_cast<double*>(workspace)), columns(padded(columns)), sums(sums),
          copies(copies_of(parts)) {}
    long long doubles(long long samples) const {
        return samples * copies * sums * LEVELS * columns;
    }
    // The first level; the second one is `columns` further.
    __device__ __forceinline__ double* at(int sample, int copy, int sum, int place) const {
        const long long number = ((long long)sample * copies + copy) * sums + sum;
        return levels + number * LEVELS * columns + place;
    }
};

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

// What the first levels of a thread's columns, at `at`, did not take of a sum, to the second ones,
// `columns` further.
static __device__ __noinline__ void add_rest(double* at, long long columns, const Columns& before,
                                             const Columns& term, const Deeper& deeper) {
    const double lost = (double)__uint_as_float(0x7fc00000u);
    const Found found = *deeper.found;
    double* const second = at + columns;
    double rest[ELEMENTS], stood[ELEMENTS];
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        double error, more, deepest = deeper.at(2, i);
        static_assert(LEVELS == 3, "what a block has below its first level");
        // A NaN where the sum is not finite: the first level says it all.
        two_sum(before.at[i], term.at[i], error);
        rest[i] = two_sum(error, deeper.at(1, i), more);
        if ((more != 0.0 || deepest != 0.0) && isfinite(rest[i])) {
            // Where a window moved, deeper levels hold what is as large as the first: once more to it.
            const double large = rest[i], was = atomicAdd(at + 32 * i, large);
            two_sum(was, large, error);
            more = two_sum(more, deepest, deepest);
            rest[i] = two_sum(error, more, more);
        }
        if (more != 0.0 || deepest != 0.0 || found.lost(i)) rest[i] = lost;
    }
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        stood[i] = rest[i] != 0.0 ? atomicAdd(second + 32 * i, rest[i]) : 0.0;
    }
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        double error;
        two_sum(stood[i], rest[i], error);
        if (error != 0.0) atomicAdd(second + 32 * i, lost);
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
    const int copy = part & (to.copies - 1);
    addition.at[0] = of_scale ? to.at(of, copy, 0, place) : nullptr;
    addition.at[1] = of_shift ? to.at(of, copy, to.sums - 1, place) : nullptr;
    addition.take(0, scale, *Deeper(shared, 0).found);
    addition.take(1, shift, *Deeper(shared, 1).found);
    // Until all is zero.
    wait_for_first_pass();
    addition.add(to.copies > 1 ? part / JointSums::MOST_COPIES : part);
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
        add_rest(addition.at[sum], to.columns, before, term, deeper);
    }
}

// 8: terms of a thread that are on their way together.
constexpr int AGAIN_LOADS = 8;
// Columns, and threads, of a block that rounds.
constexpr int ROUND_THREADS = CHUNK;

// One column again, from memory, by all threads of a block: each lane to digits of its own, then all
// to those of the first. `state` is in shared memory.
template <typename T>
__device__ __noinline__ void add_again(const Arguments<T>& a, bool of_scale, long long sample,
                                       int column, ExactState state) {
    const int thread = threadIdx.x, lane = thread % 32;
    for (int i = thread; i < STATE_ROWS * 32; i += ROUND_THREADS) state.data[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (long long first = thread; first < a.tokens; first += ROUND_THREADS * AGAIN_LOADS) {
        float terms[AGAIN_LOADS];
#pragma unroll
        for (int k = 0; k < AGAIN_LOADS; ++k) {
            const long long token = first + k * ROUND_THREADS;
            terms[k] = token < a.tokens ? sum_term(a, sample, token, column, of_scale) : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < AGAIN_LOADS; ++k) state.add_exact(lane, (double)terms[k]);
    }
    __syncthreads();
    if (thread < STATE_ROWS) {
        for (int i = 1; i < 32; ++i) state.data[thread * 32] += state.data[thread * 32 + i];
    }
    __syncthreads();
}

// A sum of infinities, or a NaN, as it is rounded.
template <typename T> __device__ __noinline__ T round_special(double sum) {
    long long limb[LIMBS] = {0};
    const Specials seen{sum != sum, sum > 0.0, sum < 0.0};
    return from_bits<T>(round_column(limb, seen, format_of(dtype_of<T>())));
}

// dscale and dshift of shared samples, from `first` on: blockIdx.x numbers chunks, blockIdx.y the sums
// of samples.
template <typename T>
__global__ void __launch_bounds__(ROUND_THREADS)
    round_sums(const __grid_constant__ Arguments<T> a, const __grid_constant__ JointSums joint,
               long long first) {
    __shared__ long long digits[STATE_ROWS * 32];
    __shared__ bool again[ROUND_THREADS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int place = blockIdx.x * CHUNK + threadIdx.x;
    const int column = blockIdx.x * CHUNK + lane * ELEMENTS + warp;
    // One or two sums: a division takes long here.
    const int of = joint.sums > 1 ? blockIdx.y / 2 : blockIdx.y, sum = blockIdx.y - of * joint.sums;
    const bool of_scale = a.dscale != nullptr && sum == 0;
    const long long sample = first + of;
    T* out = (of_scale ? a.dscale : a.dshift) + sample * a.columns;
    const double* at = joint.at(of, 0, sum, place);
    const long long apart = (long long)joint.sums * JointSums::LEVELS * joint.columns;
    prefetch(at);
    prefetch(at + joint.columns);
    wait_for_first_pass();
    double level[JointSums::LEVELS][JointSums::MOST_COPIES];
#pragma unroll
    for (int c = 0; c < JointSums::MOST_COPIES; ++c) {
        level[0][c] = c < joint.copies ? at[c * apart] : 0.0;
        level[1][c] = c < joint.copies ? at[c * apart + joint.columns] : 0.0;
    }
    PairOfDoubles total{level[0][0], level[1][0]};
    bool all = true;
    double first_levels = level[0][0], second_levels = level[1][0];  // whether they are finite
    if (joint.copies > 1) {
#pragma unroll
        for (int c = 1; c < JointSums::MOST_COPIES; ++c) {
            first_levels = __dadd_rn(first_levels, level[0][c]);
            second_levels = __dadd_rn(second_levels, level[1][c]);
            all &= total.add(level[0][c]) == 0.0;
            all &= total.add(level[1][c]) == 0.0;
        }
    }
    const bool inside = column < a.columns, finite = isfinite(first_levels);
    const bool held = finite && isfinite(second_levels) && all;
    if (inside && held) out[column] = round_double<T>(total.to_odd());
    if (inside && !finite) out[column] = round_special<T>(first_levels);
    // What two doubles do not hold: by the whole block, one column after another.
    again[threadIdx.x] = inside && finite && !held;
    if (!__syncthreads_or(again[threadIdx.x])) return;
    const ExactState state{digits, 32};
    for (int i = 0; i < ROUND_THREADS; ++i) {
        if (!again[i]) continue;
        const int lost = blockIdx.x * CHUNK + i % 32 * ELEMENTS + i / 32;
        add_again(a, of_scale, sample, lost, state);
        if (threadIdx.x == 0) {
            finish_state(state, 0, lost, {{}, out, dtype_of<T>(), kRounded});
        }
        __syncthreads();
    }
}

}  // namespace rlk
