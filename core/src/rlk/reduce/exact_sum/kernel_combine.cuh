// SPDX-License-Identifier: Apache-2.0
// The second pass of a column sum: what all blocks left, added up, and what becomes of it. Its time
// is that of a few loads, and of instructions, which come from far away as they run once.
#pragma once
#include "rlk/cuda/early.cuh"
#include "rlk/reduce/exact_sum/device_round.cuh"

namespace rlk {

// 4: columns of a block, whose doubles share the 32-byte sectors of a partial's row; 64 threads for
// each column, as time here is the latency of a few loads.
constexpr int COMBINE_COLUMNS = 4;
constexpr int COMBINE_THREADS = 256;
// 3: partials that a thread loads at once; with 64 threads a column, all of a block on each of 132
// processors, and half of those of two.
constexpr int TOGETHER = 3;
static_assert(PARTIAL_LEVELS == 2, "a pair of doubles");

// What other lanes of a warp, which have the same column, know of its sum, to the lane of it that
// comes first; whether some of it went to `rest`.
__device__ __forceinline__ bool add_lanes(PairOfDoubles& total, ExactState rest, int place) {
    bool left = false;
#pragma unroll 1
    for (int distance = 16; distance >= COMBINE_COLUMNS; distance /= 2) {
        const double high = __shfl_xor_sync(0xffffffffu, total.high, distance);
        const double low = __shfl_xor_sync(0xffffffffu, total.low, distance);
        const double lost[2] = {total.add(high), total.add(low)};
        if ((lost[0] == 0.0 && lost[1] == 0.0) || threadIdx.x % 32 >= distance) continue;
        for (int i = 0; i < 2; ++i) rest.add_exact(place, lost[i]);
        left = true;
    }
    return left;
}

// With RESTS, what fits no pair of doubles is in the partials; else the state holds it, or zeros, and
// the counters.
template <bool RESTS>
static __global__ void __launch_bounds__(COMBINE_THREADS)
    combine_partials(Partials partials, int blocks, SumResult result) {
    constexpr int WARPS = COMBINE_THREADS / 32, APART = COMBINE_THREADS / COMBINE_COLUMNS;
    static_assert(WARPS * COMBINE_COLUMNS == 32, "one warp adds up what all leave");
    __shared__ double sums[PARTIAL_LEVELS][32];
    __shared__ long long digits[STATE_ROWS * COMBINE_COLUMNS];
    const ExactState rest{digits, COMBINE_COLUMNS};
    const int place = threadIdx.x % COMBINE_COLUMNS, thread = threadIdx.x / COMBINE_COLUMNS;
    const long long column = (long long)blockIdx.x * COMBINE_COLUMNS + place;
    const bool inside = column < partials.columns;
    if (thread < STATE_ROWS) rest.data[threadIdx.x] = 0;
    PairOfDoubles total;
    bool left = false;
    int all_found = 0;
    __syncthreads();
    wait_for_first_pass();
    if (!RESTS && thread < STATE_ROWS && inside) {
        const long long digit = result.state.data[thread * partials.columns + column];
        if (digit != 0) rest.add(thread, place, digit);
        left = digit != 0;
    }
    for (int block = thread; block < blocks && inside; block += TOGETHER * APART) {
        int found[TOGETHER];
        double level[PARTIAL_LEVELS][TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const int at = block + i * APART;
            found[i] = at < blocks ? partials.flag(at, column) : 0;
            level[0][i] = at < blocks ? partials.at(at, 0, column) : 0.0;
            if (RESTS) level[1][i] = at < blocks ? partials.at(at, 1, column) : 0.0;
        }
#pragma unroll
        for (int i = 0; i < TOGETHER && !RESTS; ++i) {
            const bool deep = found[i] & Partials::DEEP;
            level[1][i] = deep ? partials.at(block + i * APART, 1, column) : 0.0;
        }
        const PairOfDoubles before = total;
        bool lost = false;
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            // Of few blocks, instructions that do nothing would still be fetched from far away.
            if (block + i * APART >= blocks) break;
            all_found |= found[i];
            lost |= total.add(level[0][i]) != 0.0;
            lost |= total.add(level[1][i]) != 0.0;
        }
        if (!lost) continue;
        // Rare: once more, each by itself, so that this stands here once.
        total = before;
        left = true;
#pragma unroll 1
        for (int i = 0; i < 2 * TOGETHER; ++i) {
            const int at = block + i / 2 * APART;
            if (at >= blocks || (i % 2 == 1 && !(partials.flag(at, column) & Partials::DEEP))) {
                continue;
            }
            rest.add_exact(place, total.add(partials.at(at, i % 2, column)));
        }
    }
#pragma unroll 1
    for (int block = thread; RESTS && all_found & Partials::REST && block < blocks;
         block += APART) {
        if (!(partials.flag(block, column) & Partials::REST)) continue;
        left = true;
#pragma unroll 1
        for (int row = 0; row < STATE_ROWS; ++row) {
            rest.add(row, place, partials.rest_at(block, row, column));
        }
    }
    // Of each warp, then of the first one, which has them all.
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
        left |= add_lanes(total, rest, place);
        if (pass == 1) break;
        if (threadIdx.x % 32 < COMBINE_COLUMNS) {
            const int at = threadIdx.x / 32 * COMBINE_COLUMNS + place;
            sums[0][at] = total.high;
            sums[1][at] = total.low;
        }
        left = __syncthreads_or(left);
        if (threadIdx.x >= 32) return;
        total = {sums[0][threadIdx.x], sums[1][threadIdx.x]};
    }
    // Also, that what other lanes added is there.
    left = __any_sync(0xffffffffu, left);
    __syncwarp();
    if (thread == 0 && inside) store_pair(result, column, total, !left, rest, place);
}

// Combine into a result; without rests its state is one that the first pass has zeroed and may have
// added to, in whatever form it ends.
inline cudaError_t launch_combine(Partials partials, int blocks, SumResult result, int device,
                                  cudaStream_t stream) {
    const int grid = (int)((result.state.columns + COMBINE_COLUMNS - 1) / COMBINE_COLUMNS);
    const auto launch = [&](auto rests) {
        return launch_kernel<combine_partials<decltype(rests)::value>>(
            true, dim3(grid), COMBINE_THREADS, 0, device, stream, partials, blocks, result);
    };
    return partials.rest != nullptr ? launch(std::true_type()) : launch(std::false_type());
}

}  // namespace rlk
