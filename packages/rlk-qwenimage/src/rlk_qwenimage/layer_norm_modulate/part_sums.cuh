// SPDX-License-Identifier: Apache-2.0
// The exact sums of samples that several blocks share: what each block leaves of its part of the
// tokens, and the second pass, which adds up parts and rounds.
#pragma once
#include "rlk/cuda/early.cuh"
#include "rlk_qwenimage/layer_norm_modulate/token_source.cuh"
#include "rlk_qwenimage/layer_norm_modulate/token_sums.cuh"

namespace rlk {

// What the units of a first pass leave: two levels of each sum, the second where a flag says so.
struct PartSums {
    double* levels;  // [units][sums][LEVELS][columns]
    int* deep;       // [units][sums][chunks]
    long long columns;
    int sums;

    static constexpr int LEVELS = 2;

    // Whole chunks, in each of which column i of lane l stands at place 32 * i + l, so that warps
    // store and load neighbours.
    static long long padded(long long columns) { return (columns + CHUNK - 1) / CHUNK * CHUNK; }
    static long long bytes(long long units, long long columns, int sums) {
        const long long chunks = padded(columns) / CHUNK;
        return units * sums * chunks * (LEVELS * CHUNK * (long long)sizeof(double) + sizeof(int));
    }
    PartSums(void* workspace, long long units, long long of, int sums)
        : levels(static_cast<double*>(workspace)), columns(padded(of)), sums(sums) {
        deep = reinterpret_cast<int*>(levels + units * sums * LEVELS * columns);
    }
    __device__ __forceinline__ double& at(int unit, int sum, int level, int place) const {
        return levels[(((long long)unit * sums + sum) * LEVELS + level) * columns + place];
    }
    __device__ __forceinline__ int& is_deep(int unit, int sum, int place) const {
        return deep[((long long)unit * sums + sum) * (columns / CHUNK) + place / CHUNK];
    }
};

// In place of a sum that fits no two levels, and more than any sum of FP32 values: such a column is
// summed again. An infinity or a NaN stands for itself.
constexpr double NO_SUM = 0x1p900;

// What a block leaves of one column, in place of its first level, where it found something.
__device__ __forceinline__ double told(double first, const Deeper& deeper, Found found, int i) {
    const float infinity = __uint_as_float(0x7f800000u);
    if (found.special(i)) {
        return subtract(found.plus(i) ? infinity : 0.0f, found.minus(i) ? infinity : 0.0f);
    }
    static_assert(LEVELS == PartSums::LEVELS + 1, "one level is not left");
    return found.lost(i) || deeper.at(LEVELS - 1, i) != 0.0 ? NO_SUM : first;
}

// Leave sum number `sum` of a block, as `part`; `column` is the thread's first. Whole warps call.
template <int BITS>
__device__ __forceinline__ void leave(const PartSums& to, const TokenSums<BITS>& sums,
                                      void* shared, int sum, int unit, int part, int column) {
    // The last slice of columns may have warps without any.
    if (column >= to.columns) return;
    const Deeper deeper(shared, sum);
    const Found found = *deeper.found;
    const int place = column / CHUNK * CHUNK + threadIdx.x % 32;
    double* at = &to.at(unit, part, 0, place);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) at[32 * i] = sums.level[i];
    const bool deep = __any_sync(0xffffffffu, found.is_deep());
    if (found.bits != 0) {
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) at[32 * i] = told(sums.level[i], deeper, found, i);
    }
    if (deep) {
#pragma unroll 1
        for (int i = 0; i < ELEMENTS; ++i) at[to.columns + 32 * i] = deeper.at(1, i);
    }
    if (threadIdx.x % 32 == 0) to.is_deep(unit, part, place) = deep;
}

// 8: parts that a block adds up at once, one by each warp, of as many columns as a warp has lanes.
constexpr int COMBINE_WARPS = 8;
// 8: loads of a thread that are on their way together.
constexpr int COMBINE_LOADS = 8;

// One column again, with all that parts may tell; threads `part` on of `step` for it. `state` is in
// shared memory, zeros.
template <typename T>
__device__ __noinline__ void add_again(const Arguments<T>& a, const PartSums& parts, int first,
                                       int count, int sum, bool of_scale, long long sample,
                                       int place, int column, ExactState state) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    bool lost = false;
#pragma unroll 8
    for (int p = 0; p < count; ++p) lost |= parts.at(first + p, sum, 0, place) == NO_SUM;
    if (lost) {
#pragma unroll 1
        for (long long token = warp; token < a.tokens; token += COMBINE_WARPS) {
            const float term = sum_term(a, sample, token, column, of_scale);
            if (isfinite(term)) state.add_exact(lane, (double)term);
            else state.count_special(lane, term);
        }
        return;
    }
#pragma unroll 1
    for (int p = warp; p < count; p += COMBINE_WARPS) {
        const double told = parts.at(first + p, sum, 0, place);
        if (!isfinite(told)) {
            state.count_special(lane, (float)told);
            continue;
        }
        state.add_exact(lane, told);
        if (parts.is_deep(first + p, sum, place)) {
            state.add_exact(lane, parts.at(first + p, sum, 1, place));
        }
    }
}

// dscale and dshift of shared samples: blockIdx.x numbers 32 places, blockIdx.y the sums of samples.
template <typename T>
__global__ void __launch_bounds__(COMBINE_WARPS * 32)
    combine_parts(const __grid_constant__ Arguments<T> a, const __grid_constant__ Division d,
                  const __grid_constant__ PartSums parts) {
    __shared__ double pairs[COMBINE_WARPS][2][32];
    __shared__ long long digits[STATE_ROWS * 32];
    __shared__ int again[32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int place = blockIdx.x * 32 + lane;
    const int column = place / CHUNK * CHUNK + lane * ELEMENTS + place % CHUNK / 32;
    const int of = blockIdx.y / parts.sums, sum = blockIdx.y % parts.sums, first = of * d.parts;
    const bool of_scale = a.dscale != nullptr && sum == 0;
    const long long sample = d.first + of;
    T* out = of_scale ? a.dscale : a.dshift;
    const ExactState state{digits, 32};
    for (int i = threadIdx.x; i < STATE_ROWS * 32; i += COMBINE_WARPS * 32) digits[i] = 0;
    if (warp == 0) again[lane] = 0;
    wait_for_first_pass();
    PairOfDoubles total;
    for (int p = warp; p < d.parts; p += COMBINE_WARPS * COMBINE_LOADS) {
        double value[COMBINE_LOADS];
        int deep[COMBINE_LOADS];
#pragma unroll
        for (int k = 0; k < COMBINE_LOADS; ++k) {
            const int part = p + k * COMBINE_WARPS;
            const bool inside = part < d.parts;
            value[k] = inside ? parts.at(first + part, sum, 0, place) : 0.0;
            deep[k] = inside ? parts.is_deep(first + part, sum, place) : 0;
        }
#pragma unroll
        for (int k = 0; k < COMBINE_LOADS; ++k) {
            total.add(value[k]);
            if (deep[k]) total.add(parts.at(first + p + k * COMBINE_WARPS, sum, 1, place));
        }
    }
    pairs[warp][0][lane] = total.high;
    pairs[warp][1][lane] = total.low;
    __syncthreads();
    if (warp == 0) {
#pragma unroll
        for (int w = 1; w < COMBINE_WARPS; ++w) {
            total.add(pairs[w][0][lane]);
            total.add(pairs[w][1][lane]);
        }
    }
    // Where a part left no sum or a special value, it is not below NO_SUM.
    const bool held = fabs(total.high) < NO_SUM && total.all;
    const bool inside = column < a.columns;
    if (warp == 0 && held && inside) {
        out[sample * a.columns + column] = round_double<T>(total.to_odd());
    }
    // What two doubles do not hold: by all threads of the column.
    if (!held) again[lane] = 1;
    if (!__syncthreads_or(!held)) return;
    const bool mine = again[lane] && inside;
    if (mine) add_again(a, parts, first, d.parts, sum, of_scale, sample, place, column, state);
    __syncthreads();
    if (!mine || warp > 0) return;
    finish_state(state, lane, column,
                 {{}, out + sample * a.columns, dtype_of<T>(), kRounded});
}

}  // namespace rlk
