// SPDX-License-Identifier: Apache-2.0
// Forward of the RMS norms: one read of the rows, one write.
#pragma once
#include <type_traits>

#include "rlk_qwen3next/rms_norm/copies.cuh"
#include "rlk_qwen3next/rms_norm/device_cuda.cuh"

namespace rlk {

// 256: threads of a block of narrow rows. Grids are chosen freely: no bit depends on them.
constexpr int NARROW_THREADS = 256;
// 1024: the same where a block fills a table first.
constexpr int TABLE_THREADS = 1024;
// 32 warps of one chunk each: the longest row whose values stay in registers.
constexpr int WIDE_WARPS = 32;

template <typename N, bool VECTOR, typename T, typename Activations>
__device__ __forceinline__ void store_forward(const NormArguments<T>& a, Activations activations,
                                              T* y_at, int count, const Packed<T>& row,
                                              const Packed<T>& gate, float rstd,
                                              const float (&weight)[ELEMENTS]) {
    float x[ELEMENTS], y[ELEMENTS], act[ELEMENTS];
    if (N::GATED) activations.find(gate, a.silu, act);
    unpack(row, x);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        y[i] = multiply(multiply(x[i], rstd), weight[i]);
        if (N::GATED) y[i] = multiply(y[i], act[i]);
    }
    store<VECTOR>(y_at, count, y);
}

// The rows of one turn: x as loaded, or the sum in its place.
template <typename T, bool VECTOR> struct ForwardRows {
    Packed<T> x[FORWARD_ROWS], beside[FORWARD_ROWS];

    // Put sums in the place of x and store them; `out` is where the first row of the turn goes.
    __device__ __forceinline__ void add_residual(const Turns<FORWARD_ROWS>& turns, int turn,
                                                 int count, T* out, long long columns) {
#pragma unroll
        for (int u = 0; u < FORWARD_ROWS; ++u) {
            x[u] = rounded_sum(x[u], beside[u]);
            store_packed<VECTOR>(out + u * turns.apart * columns, turns.inside(turn, u, count),
                                 x[u]);
        }
    }
    __device__ __forceinline__ void dots(float (&sums)[FORWARD_ROWS]) const {
#pragma unroll
        for (int u = 0; u < FORWARD_ROWS; ++u) {
            float values[ELEMENTS];
            unpack(x[u], values);
            sums[u] = lane_dot(values, values);
        }
    }
};

// Turns on their way: a thread copies its own share of the next rows to shared memory.
template <typename T, typename N> struct ForwardRing {
    // 2: turns on their way. With 4, fewer blocks fit a processor, and it takes longer.
    static constexpr int STAGES = 2;
    static constexpr int WORDS = Packed<T>::WORDS;
    static constexpr int ROW_WORDS = (N::BESIDE ? 2 : 1) * WORDS;

    Cursor<T> x, beside;
    uint4* words;  // [STAGES][FORWARD_ROWS][ROW_WORDS][threads], this thread's
    int threads, stage;

    static constexpr int bytes(int threads) {
        return STAGES * FORWARD_ROWS * ROW_WORDS * threads * (int)sizeof(uint4);
    }
    __device__ __forceinline__ ForwardRing(const NormArguments<T>& a,
                                           const Turns<FORWARD_ROWS>& turns, int column, int count,
                                           int threads, void* shared)
        : x(a.x, turns.row, column, turns.step),
          beside(N::BESIDE ? a.beside : a.x, turns.row, column, turns.step),
          words(static_cast<uint4*>(shared) + threadIdx.x), threads(threads), stage(0) {
        for (int s = 0; s < STAGES; ++s) fetch(a, turns, s, count, s);
    }
    __device__ __forceinline__ void fetch(const NormArguments<T>& a,
                                          const Turns<FORWARD_ROWS>& turns, int turn, int count,
                                          int s) {
        uint4* to = words + s * FORWARD_ROWS * ROW_WORDS * threads;
#pragma unroll
        for (int u = 0; u < FORWARD_ROWS; ++u, to += ROW_WORDS * threads) {
            const bool exists = turns.inside(turn, u, count) > 0;
            copy_eight(x.at + u * turns.apart * a.x.row_stride, to, threads, exists);
            if (!N::BESIDE) continue;
            copy_eight(beside.at + u * turns.apart * a.beside.row_stride, to + WORDS * threads,
                       threads, exists);
        }
        x.advance();
        if (N::BESIDE) beside.advance();
        __pipeline_commit();
    }
    // The rows in front, whose place is then given to those STAGES turns later.
    __device__ __forceinline__ ForwardRows<T, true> next(const NormArguments<T>& a,
                                                         const Turns<FORWARD_ROWS>& turns, int turn,
                                                         int count) {
        wait_for_copies<STAGES - 1>();
        ForwardRows<T, true> rows;
        const uint4* from = words + stage * FORWARD_ROWS * ROW_WORDS * threads;
#pragma unroll
        for (int u = 0; u < FORWARD_ROWS; ++u, from += ROW_WORDS * threads) {
            rows.x[u] = copied_eight<T>(from, threads);
            if (N::BESIDE) rows.beside[u] = copied_eight<T>(from + WORDS * threads, threads);
        }
        fetch(a, turns, turn + STAGES, count, stage);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        return rows;
    }
    // No copy outlives its block, zeros of rows that do not exist among them.
    __device__ __forceinline__ void finish() const { wait_for_copies<0>(); }
};

// Where a ring does not fit or words cannot be read: the next turn's rows while a lane works on this
// one's.
template <typename T, typename N> struct ForwardAhead {
    Cursor<T> x, beside;
    ForwardRows<T, false> ahead;

    static constexpr int bytes(int) { return 0; }
    __device__ __forceinline__ ForwardAhead(const NormArguments<T>& a,
                                            const Turns<FORWARD_ROWS>& turns, int column, int count,
                                            int, void*)
        : x(a.x, turns.row, column, turns.step),
          beside(N::BESIDE ? a.beside : a.x, turns.row, column, turns.step) {
        fetch(a, turns, 0, count);
    }
    __device__ __forceinline__ void fetch(const NormArguments<T>& a,
                                          const Turns<FORWARD_ROWS>& turns, int turn, int count) {
#pragma unroll
        for (int u = 0; u < FORWARD_ROWS; ++u) {
            const int inside = turns.inside(turn, u, count);
            ahead.x[u] = x.template load<false>(inside, u * turns.apart * a.x.row_stride);
            if (!N::BESIDE) continue;
            ahead.beside[u] =
                beside.template load<false>(inside, u * turns.apart * a.beside.row_stride);
        }
        x.advance();
        if (N::BESIDE) beside.advance();
    }
    __device__ __forceinline__ ForwardRows<T, false> next(const NormArguments<T>& a,
                                                          const Turns<FORWARD_ROWS>& turns,
                                                          int turn, int count) {
        const ForwardRows<T, false> rows = ahead;
        fetch(a, turns, turn + 1, count);
        return rows;
    }
    __device__ __forceinline__ void finish() const {}
};

template <typename T, typename N, bool VECTOR>
using ForwardSource = std::conditional_t<VECTOR, ForwardRing<T, N>, ForwardAhead<T, N>>;

// Shared memory of `forward_narrow`: the ring, and after it the table.
template <typename T, typename N, bool VECTOR, int THREADS> struct ForwardLayout {
    static constexpr bool TABLE = THREADS == TABLE_THREADS;
    static constexpr int RING_BYTES = ForwardSource<T, N, VECTOR>::bytes(THREADS);
    static constexpr int BYTES = RING_BYTES + (TABLE ? ActivationTable::BYTES : 0);
};

// Rows of at most 256 columns: LANES neighbouring lanes hold a row.
template <typename T, typename N, bool VECTOR, int LANES, int THREADS>
__global__ void __launch_bounds__(THREADS) forward_narrow(NormArguments<T> a) {
    constexpr int GROUPS = THREADS / LANES;
    using Layout = ForwardLayout<T, N, VECTOR, THREADS>;
    extern __shared__ __align__(16) char forward_shared[];
    const int lane = threadIdx.x % LANES, column = lane * ELEMENTS;
    const int count = elements_inside(column, a.columns);
    const long long first = (long long)blockIdx.x * GROUPS * FORWARD_ROWS + threadIdx.x / LANES;
    const Turns<FORWARD_ROWS> turns(a.rows, first, GROUPS,
                                    (long long)gridDim.x * GROUPS * FORWARD_ROWS);
    ForwardSource<T, N, VECTOR> source(a, turns, column, count, THREADS, forward_shared);
    float weight[ELEMENTS];
    offset_weight(a.weight, a.weight_dtype, a.weight_stride, a.weight_offset, column, a.columns,
                  weight);
    std::conditional_t<Layout::TABLE, ActivationTable, ComputedActivations> activations;
    if constexpr (Layout::TABLE) {
        activations = ActivationTable::fill(forward_shared + Layout::RING_BYTES, a.silu);
        __syncthreads();
    }
    T* y_at = a.y + first * a.columns + column;
    T* sum_at = a.residual_out + first * a.columns + column;
    float* rstd_at = a.rstd_out + first + lane * GROUPS;
    // Lane 0 has the most turns: a warp takes them together, for its shuffles.
    const int most = __shfl_sync(0xffffffffu, turns.of[0], 0);
    for (int turn = 0; turn < most; ++turn) {
        ForwardRows<T, VECTOR> rows = source.next(a, turns, turn, count);
        if (N::RESIDUAL) rows.add_residual(turns, turn, count, sum_at, a.columns);
        float sums[FORWARD_ROWS];
        rows.dots(sums);
        // A lane takes the root of one of its group's rows only.
        const float own = inverse_rms<typename N::Root>(chunk_trees<LANES>(sums), a.length, a.eps);
#pragma unroll
        for (int u = 0; u < FORWARD_ROWS; ++u) {
            if (lane == u && turn < turns.of[u]) *rstd_at = own;
            const int holder = threadIdx.x % 32 / FORWARD_ROWS * FORWARD_ROWS + u;
            const float rstd = FORWARD_ROWS == 1 ? own : __shfl_sync(0xffffffffu, own, holder);
            store_forward<N, VECTOR>(a, activations, y_at + u * GROUPS * a.columns,
                                     turns.inside(turn, u, count), rows.x[u], rows.beside[u], rstd,
                                     weight);
        }
        y_at += turns.step * a.columns;
        if (N::RESIDUAL) sum_at += turns.step * a.columns;
        rstd_at += turns.step;
    }
    source.finish();
}

// Rows of 257 to 8192 columns: a block holds FORWARD_ROWS rows, a warp one chunk of each.
template <typename T, typename N, bool VECTOR, int THREADS>
__global__ void __launch_bounds__(THREADS) forward_wide(NormArguments<T> a) {
    extern __shared__ __align__(16) char forward_shared[];
    __shared__ ChunkSums<THREADS / 32, FORWARD_ROWS> chunks;
    const int column = threadIdx.x * ELEMENTS;
    const int count = elements_inside(column, a.columns);
    const long long first = (long long)blockIdx.x * FORWARD_ROWS;
    const Turns<FORWARD_ROWS> turns(a.rows, first, 1, (long long)gridDim.x * FORWARD_ROWS);
    ForwardSource<T, N, VECTOR> source(a, turns, column, count, blockDim.x, forward_shared);
    float weight[ELEMENTS];
    offset_weight(a.weight, a.weight_dtype, a.weight_stride, a.weight_offset, column, a.columns,
                  weight);
    T* y_at = a.y + first * a.columns + column;
    T* sum_at = a.residual_out + first * a.columns + column;
    float* rstd_at = a.rstd_out + first + threadIdx.x;
    chunks.clear();
    for (int turn = 0; turn < turns.of[0]; ++turn) {
        ForwardRows<T, VECTOR> rows = source.next(a, turns, turn, count);
        if (N::RESIDUAL) rows.add_residual(turns, turn, count, sum_at, a.columns);
        float sums[FORWARD_ROWS];
        rows.dots(sums);
        const float own = inverse_rms<typename N::Root>(chunks.total(turn, sums), a.length, a.eps);
#pragma unroll
        for (int u = 0; u < FORWARD_ROWS; ++u) {
            if (threadIdx.x == u && turn < turns.of[u]) *rstd_at = own;
            const float rstd = FORWARD_ROWS == 1 ? own : __shfl_sync(0xffffffffu, own, u);
            store_forward<N, VECTOR>(a, ComputedActivations(), y_at + u * a.columns,
                                     turns.inside(turn, u, count), rows.x[u], rows.beside[u], rstd,
                                     weight);
        }
        y_at += turns.step * a.columns;
        if (N::RESIDUAL) sum_at += turns.step * a.columns;
        rstd_at += turns.step;
    }
    source.finish();
}

// Eight elements of what the norm reads in a long row.
template <typename N, typename T>
__device__ __forceinline__ Packed<T> load_sum(const NormArguments<T>& a, long long row, int column,
                                              int count) {
    const Packed<T> x = Cursor<T>(a.x, row, column, 0).template load<false>(count);
    if (!N::RESIDUAL) return x;
    return rounded_sum(x, Cursor<T>(a.beside, row, column, 0).template load<false>(count));
}

// Longer rows: warps take turns at chunks, and the row is read twice, from cache.
template <typename T, typename N>
__global__ void __launch_bounds__(WIDE_WARPS * 32) forward_long(NormArguments<T> a) {
    extern __shared__ float long_sums[];  // [chunks]
    float* sums = long_sums;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int chunks = (a.columns + CHUNK - 1) / CHUNK;
    for (long long row = blockIdx.x; row < a.rows; row += gridDim.x) {
        for (int chunk = warp; chunk < chunks; chunk += WIDE_WARPS) {
            const int column = chunk * CHUNK + lane * ELEMENTS;
            float values[ELEMENTS];
            unpack(load_sum<N>(a, row, column, elements_inside(column, a.columns)), values);
            const float sum = chunk_tree<32>(lane_dot(values, values));
            if (lane == 0) sums[chunk] = sum;
        }
        __syncthreads();
        const float rstd = inverse_rms<typename N::Root>(add_long_chunks(sums, chunks), a.length, a.eps);
        __syncthreads();
        for (int chunk = warp; chunk < chunks; chunk += WIDE_WARPS) {
            const int column = chunk * CHUNK + lane * ELEMENTS;
            const int count = elements_inside(column, a.columns);
            float weight[ELEMENTS];
            const Packed<T> x = load_sum<N>(a, row, column, count);
            if (N::RESIDUAL) {
                store_packed<false>(a.residual_out + row * a.columns + column, count, x);
            }
            Packed<T> gate;
            if (N::GATED) gate = Cursor<T>(a.beside, row, column, 0).template load<false>(count);
            offset_weight(a.weight, a.weight_dtype, a.weight_stride, a.weight_offset, column,
                          a.columns, weight);
            store_forward<N, false>(a, ComputedActivations(), a.y + row * a.columns + column, count, x,
                                    gate, rstd, weight);
        }
        if (threadIdx.x == 0) a.rstd_out[row] = rstd;
    }
}

}  // namespace rlk
