// SPDX-License-Identifier: Apache-2.0
// The second pass of a column sum: the first levels of all blocks into the integer state, and what
// becomes of it.
#pragma once
#include "rlk/cuda/early.cuh"
#include "rlk/reduce/exact_sum/device_round.cuh"

namespace rlk {

// 4: columns of a block, whose doubles share the 32-byte sectors of a partial's row; 64 threads for
// each column, as time here is the latency of a few loads.
constexpr int COMBINE_COLUMNS = 4;
constexpr int COMBINE_THREADS = 256;
// 5: partials that a thread loads at once; with 64 threads a column, all of two blocks on each of
// 132 processors, and half of those that come in four parts.
constexpr int TOGETHER = 5;
static_assert(PARTIAL_LEVELS == 2, "one of them without a flag, one with it");

// The 32 bits that `value`, a multiple of 2^-149, has in a limb, with its sign.
__device__ __forceinline__ long long limb_of(double value, int limb) {
    const unsigned long long bits = (unsigned long long)__double_as_longlong(value);
    const int exponent = (int)(bits >> 52) & 2047;
    const unsigned long long mantissa =
        exponent == 0 ? 0 : (bits & ((1ull << 52) - 1)) | (1ull << 52);
    // 926 = 1075 - 149: value = mantissa * 2^(exponent - 926) in units of 2^-149
    const int shift = 32 * limb - (exponent - 926);
    unsigned long long piece = 0;
    if (shift >= 0 && shift < 64) piece = mantissa >> shift;
    if (shift < 0 && shift > -32) piece = mantissa << -shift;
    const long long digit = (long long)(piece & 0xffffffffull);
    return (long long)bits < 0 ? -digit : digit;
}

// Sums over the lanes of a warp that have the same column.
__device__ __forceinline__ long long sum_of_column(long long value) {
#pragma unroll
    for (int distance = 16; distance >= COMBINE_COLUMNS; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

// Sums of a column: what a thread gathers of it.
struct ColumnTotal {
    double level[PARTIAL_LEVELS] = {0.0};
    long long limb[LIMBS] = {0};

    __device__ __forceinline__ void add_limbs(double value) {
        if (value == 0.0) return;
#pragma unroll
        for (int i = 0; i < LIMBS; ++i) limb[i] += limb_of(value, i);
    }
    // What the levels lose.
    __device__ __forceinline__ double add_to_levels(double value) {
#pragma unroll
        for (int d = 0; d < PARTIAL_LEVELS; ++d) level[d] = two_sum(level[d], value, value);
        return value;
    }
    __device__ __forceinline__ void add(double value) { add_limbs(add_to_levels(value)); }
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int d = 0; d < PARTIAL_LEVELS; ++d) add_limbs(level[d]);
    }
};

// The sums of columns from `first` on that one block has all terms of, from what `merge` left; its
// threads have `rest` in shared memory. Whole blocks call.
template <int WIDTH>
__device__ __noinline__ void finish_sums(Partials partials, ExactState rest, long long first,
                                         SumResult result) {
    __syncthreads();
    const long long column = first + threadIdx.x;
    if (threadIdx.x >= WIDTH || column >= partials.columns) return;
    ColumnTotal total;
    for (int part = 0; part < partials.parts; ++part) {
#pragma unroll
        for (int d = 0; d < PARTIAL_LEVELS; ++d) total.add(partials.at(0, part, d, column));
    }
    total.finish();
    long long counter[STATE_ROWS - LIMBS];
#pragma unroll
    for (int i = 0; i < STATE_ROWS; ++i) {
        const long long more = rest.data[i * WIDTH + threadIdx.x];
        if (i < LIMBS) total.limb[i] += more;
        else counter[i - LIMBS] = more;
    }
    store_sum(result, column, total.limb, counter);
}

// Without rests, the state holds what was deeper than the partials, or zeros, and the counters.
static __global__ void __launch_bounds__(COMBINE_THREADS)
    combine_partials(Partials partials, int blocks, SumResult result) {
    const ExactState state = result.state;
    constexpr int WARPS = COMBINE_THREADS / 32, STEP = COMBINE_THREADS / COMBINE_COLUMNS;
    __shared__ long long sums[LIMBS][WARPS][COMBINE_COLUMNS];
    __shared__ long long totals[STATE_ROWS][COMBINE_COLUMNS];
    const int place = threadIdx.x % COMBINE_COLUMNS, thread = threadIdx.x / COMBINE_COLUMNS;
    const long long first = (long long)blockIdx.x * COMBINE_COLUMNS, column = first + place;
    const bool inside = column < state.columns;
    const bool rests = partials.rest != nullptr;
    for (int i = threadIdx.x; i < STATE_ROWS * COMBINE_COLUMNS; i += COMBINE_THREADS) {
        const int row = i / COMBINE_COLUMNS, at = i % COMBINE_COLUMNS;
        totals[row][at] = 0;
        if (!rests && first + at < state.columns) {
            totals[row][at] = state.data[row * state.columns + first + at];
        }
    }
    ColumnTotal total;
    __syncthreads();
    wait_for_first_pass();
    // Parts are a power of two, as threads are: a thread has the same one of each of its blocks. By
    // shifts: a division takes longer than a block's partial.
    const int bits = 31 - __clz(partials.parts);
    const int part = thread & (partials.parts - 1), apart = STEP >> bits, own = thread >> bits;
    int all_found = 0;
    for (int block = own; block < blocks && inside; block += TOGETHER * apart) {
        int found[TOGETHER];
        double level[PARTIAL_LEVELS][TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const int at = block + i * apart;
            found[i] = at < blocks ? partials.flag(at, column) : 0;
            level[0][i] = at < blocks ? partials.at(at, part, 0, column) : 0.0;
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const bool deep = found[i] & Partials::DEEP;
            level[1][i] = deep ? partials.at(block + i * apart, part, 1, column) : 0.0;
        }
        const double before[PARTIAL_LEVELS] = {total.level[0], total.level[1]};
        bool lost = false;
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            // Of few blocks, instructions that do nothing would still be fetched from far away.
            if (block + i * apart >= blocks) break;
            all_found |= found[i];
            lost |= total.add_to_levels(level[0][i]) != 0.0;
            lost |= total.add_to_levels(level[1][i]) != 0.0;
        }
        if (!lost) continue;
        // Rare: once more, each by itself, so that this stands here once.
        total.level[0] = before[0];
        total.level[1] = before[1];
#pragma unroll 1
        for (int i = 0; i < 2 * TOGETHER; ++i) {
            const int at = block + i / 2 * apart;
            if (at >= blocks || (i % 2 == 1 && !(partials.flag(at, column) & Partials::DEEP))) {
                continue;
            }
            total.add(partials.at(at, part, i % 2, column));
        }
    }
#pragma unroll 1
    for (int block = own; all_found & Partials::REST && part == 0 && block < blocks;
         block += apart) {
        if (!(partials.flag(block, column) & Partials::REST)) continue;
#pragma unroll 1
        for (int row = 0; row < STATE_ROWS; ++row) {
            atomicAdd(reinterpret_cast<unsigned long long*>(&totals[row][place]),
                      (unsigned long long)partials.rest_at(block, row, column));
        }
    }
    total.finish();
#pragma unroll
    for (int i = 0; i < LIMBS; ++i) {
        const long long sum = sum_of_column(total.limb[i]);
        if (threadIdx.x % 32 == place) sums[i][threadIdx.x / 32][place] = sum;
    }
    __syncthreads();
    if (thread < STATE_ROWS && inside) {
        long long sum = totals[thread][place];
        for (int warp = 0; warp < WARPS && thread < LIMBS; ++warp) sum += sums[thread][warp][place];
        totals[thread][place] = sum;
    }
    __syncthreads();
    if (thread > 0 || !inside) return;
    long long limb[LIMBS];
#pragma unroll
    for (int i = 0; i < LIMBS; ++i) limb[i] = totals[i][place];
    const long long counter[STATE_ROWS - LIMBS] = {totals[LIMBS][place], totals[LIMBS + 1][place],
                                                   totals[LIMBS + 2][place]};
    store_sum(result, column, limb, counter);
}

// Combine into a result; without rests its state is one that the first pass has zeroed and may have
// added to, in whatever form it ends.
inline cudaError_t launch_combine(Partials partials, int blocks, SumResult result, int device,
                                  cudaStream_t stream) {
    const int grid = (int)((result.state.columns + COMBINE_COLUMNS - 1) / COMBINE_COLUMNS);
    // Without rests it reads, before it waits, what the first pass adds to.
    return launch_kernel<combine_partials>(partials.rest != nullptr, dim3(grid), COMBINE_THREADS,
                                           0, device, stream, partials, blocks, result);
}

}  // namespace rlk
