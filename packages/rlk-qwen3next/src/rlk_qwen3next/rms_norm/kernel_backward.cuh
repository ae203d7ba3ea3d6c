// SPDX-License-Identifier: Apache-2.0
// Backward of the RMS norms: one read of every row, dx, dgate and the exact dweight. The dx of a
// norm of a sum is that of the sum, its own gradient included.
#pragma once
#include <type_traits>

#include "rlk/reduce/exact_sum/kernel_combine.cuh"
#include "rlk_qwen3next/rms_norm/kernel_forward.cuh"
#include "rlk_qwen3next/rms_norm/row_source.cuh"

namespace rlk {

// What a lane knows of a row before the row dot product is complete.
struct BackwardTerms {
    float g[ELEMENTS], xhat[ELEMENTS], contribution[ELEMENTS], dgate[ELEMENTS];
};

// Of `inside` elements, or of all where a row is read by words; the rest is zero, also where rstd
// is infinite and 0 * rstd would be NaN.
template <typename N, bool VECTOR, typename T, typename Activations>
__device__ __forceinline__ BackwardTerms backward_terms(const NormArguments<T>& a,
                                                        Activations activations,
                                                        const BackwardRow<T>& r, int inside,
                                                        const float (&weight)[ELEMENTS]) {
    float dy[ELEMENTS], x[ELEMENTS], act[ELEMENTS], derivative[ELEMENTS];
    if (N::GATED) activations.find(r.beside, a.silu, act, derivative);
    unpack(r.dy, dy);
    unpack(r.x, x);
    BackwardTerms t;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        t.xhat[i] = VECTOR || i < inside ? multiply(x[i], r.rstd) : 0.0f;
        t.g[i] = multiply(dy[i], weight[i]);
        t.contribution[i] = multiply(dy[i], t.xhat[i]);
        if (N::GATED) {
            t.dgate[i] = multiply(multiply(t.contribution[i], weight[i]), derivative[i]);
            t.g[i] = multiply(t.g[i], act[i]);
            t.contribution[i] = multiply(t.contribution[i], act[i]);
        }
    }
    return t;
}

// Where a lane writes in the rows of its turns.
template <typename T, typename N> struct GradientCursor {
    T *dx, *dgate;
    long long apart, step;

    __device__ __forceinline__ GradientCursor(const NormArguments<T>& a,
                                              const Turns<TURN_ROWS>& turns, int column)
        : dx(a.dx + turns.row * a.columns + column),
          dgate(a.dgate + turns.row * a.columns + column), apart(turns.apart * a.columns),
          step(turns.step * a.columns) {}
    __device__ __forceinline__ void advance() {
        dx += step;
        if (N::GATED) dgate += step;
    }
};

// dx of the rows of a turn; a lane has the dot product of row `threadIdx.x % TURN_ROWS`.
template <typename N, bool VECTOR, typename T>
__device__ __forceinline__ void store_dx(const NormArguments<T>& a, const GradientCursor<T, N>& out,
                                         const Turns<TURN_ROWS>& turns, int turn, int count,
                                         const float (&g)[TURN_ROWS][ELEMENTS],
                                         const BackwardRow<T> (&rows)[TURN_ROWS], float dot) {
    const float own = divide(dot, a.length);
#pragma unroll
    for (int u = 0; u < TURN_ROWS; ++u) {
        const int holder = threadIdx.x % 32 / TURN_ROWS * TURN_ROWS + u;
        const float m = __shfl_sync(0xffffffffu, own, holder);
        float x[ELEMENTS], beside[ELEMENTS], dx[ELEMENTS];
        unpack(rows[u].x, x);
        if (N::RESIDUAL) unpack(rows[u].beside, beside);
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) {
            const float xhat = multiply(x[i], rows[u].rstd);
            dx[i] = input_gradient(g[u][i], xhat, rows[u].rstd, m);
            if (N::RESIDUAL) dx[i] = add(dx[i], beside[i]);
        }
        store<VECTOR>(out.dx + u * out.apart, turns.inside(turn, u, count), dx);
    }
}

// What a lane makes of the rows of a turn before their dot products are complete: dgate, its terms
// of the column sums, and its share of the dot products.
template <typename N, bool VECTOR, typename T, typename Activations>
__device__ __forceinline__ void first_half(
    const NormArguments<T>& a, Activations activations, const GradientCursor<T, N>& out,
    const Turns<TURN_ROWS>& turns, int turn, int count, const float (&weight)[ELEMENTS],
    const BackwardRow<T> (&rows)[TURN_ROWS], float (&g)[TURN_ROWS][ELEMENTS],
    float (&contribution)[TURN_ROWS][ELEMENTS], float (&dots)[TURN_ROWS]) {
#pragma unroll
    for (int u = 0; u < TURN_ROWS; ++u) {
        const int inside = turns.inside(turn, u, count);
        const BackwardTerms t = backward_terms<N, VECTOR>(a, activations, rows[u], inside, weight);
        if (N::GATED && a.dgate != nullptr) {
            store<VECTOR>(out.dgate + u * out.apart, inside, t.dgate);
        }
        dots[u] = lane_dot(t.g, t.xhat);
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) {
            g[u][i] = t.g[i];
            contribution[u][i] = t.contribution[i];
        }
    }
}

// 512: threads of a block that fills a table first; with 128 registers, all that a processor holds.
constexpr int BACKWARD_TABLE_THREADS = 512;

// Shared memory of `backward_narrow`, in this order: deeper levels of the sums, the ring, in whose
// place they are merged, their rest, and the table.
template <typename T, typename N, bool VECTOR, int LANES, int THREADS> struct NarrowLayout {
    static constexpr bool TABLE = THREADS == BACKWARD_TABLE_THREADS;
    // A table takes the room of half the ring.
    using Source = RowSource<T, N, VECTOR, TABLE ? TURN_ROWS : ROWS_AHEAD<T>>;
    using Activations = std::conditional_t<TABLE, DerivativeTable, ComputedActivations>;
    static constexpr int WIDTH = LANES * ELEMENTS;

    static constexpr int STAGED =
        WindowSums<ELEMENTS>::staged_doubles(THREADS) * (int)sizeof(double);
    static constexpr int LEVEL_BYTES = WindowSums<ELEMENTS>::doubles(THREADS) * (int)sizeof(double);
    static constexpr int RING_BYTES =
        Source::bytes(THREADS) > STAGED ? Source::bytes(THREADS) : STAGED;
    static constexpr int REST_BYTES = STATE_ROWS * WIDTH * (int)sizeof(long long);
    static constexpr int BYTES =
        LEVEL_BYTES + RING_BYTES + REST_BYTES + (TABLE ? DerivativeTable::BYTES : 0);
    static_assert(LEVEL_BYTES % 16 == 0 && RING_BYTES % 16 == 0 && REST_BYTES % 16 == 0,
                  "each begins at a 16-byte word");
};

// Rows of at most 256 columns, or 256 columns of longer rows where only their sums are wanted:
// blockIdx.y is the chunk, LANES neighbouring lanes hold a row of it.
template <typename T, typename N, bool VECTOR, int LANES, int THREADS>
__global__ void __launch_bounds__(THREADS, 512 / THREADS) backward_narrow(NormArguments<T> a) {
    using Layout = NarrowLayout<T, N, VECTOR, LANES, THREADS>;
    extern __shared__ __align__(16) double shared[];
    char* const ring = reinterpret_cast<char*>(shared) + Layout::LEVEL_BYTES;
    char* const rest_at = ring + Layout::RING_BYTES;
    constexpr int GROUPS = THREADS / LANES;
    const int place = (threadIdx.x % LANES) * ELEMENTS, column = blockIdx.y * CHUNK + place;
    const int count = elements_inside(column, a.columns);
    const long long first = (long long)blockIdx.x * GROUPS * TURN_ROWS + threadIdx.x / LANES;
    const Turns<TURN_ROWS> turns(a.rows, first, GROUPS, (long long)gridDim.x * GROUPS * TURN_ROWS);
    typename Layout::Source source(a, turns, column, THREADS, ring);
    float weight[ELEMENTS];
    offset_weight(a.weight, a.weight_dtype, a.weight_stride, a.weight_offset, column, a.columns,
                  weight);
    WindowSums<ELEMENTS> sums;
    sums.clear(shared, THREADS);
    const ExactState rest{reinterpret_cast<long long*>(rest_at), Layout::WIDTH};
    for (int i = threadIdx.x; i < STATE_ROWS * Layout::WIDTH; i += THREADS) rest.data[i] = 0;
    typename Layout::Activations activations;
    if constexpr (Layout::TABLE) {
        activations = DerivativeTable::fill(rest_at + Layout::REST_BYTES, a.silu);
    }
    // The rest is zero and the table full from here on.
    __syncthreads();
    GradientCursor<T, N> out(a, turns, column);
    const bool summed = a.state != nullptr && count > 0;
    // Lane 0 has the most turns: a warp takes them together, for its shuffles.
    const int most = __shfl_sync(0xffffffffu, turns.of[0], 0);
    for (int turn = 0; turn < most; ++turn) {
        BackwardRow<T> rows[TURN_ROWS];
        float g[TURN_ROWS][ELEMENTS], contribution[TURN_ROWS][ELEMENTS], dots[TURN_ROWS];
        source.next(turn, rows);
        first_half<N, VECTOR>(a, activations, out, turns, turn, count, weight, rows, g,
                              contribution, dots);
        // Before the sums, with dx or without: their branches would keep what it takes in registers.
        const float dot = chunk_trees<LANES>(dots);
        if (summed) sums.add(contribution, rest, place);
        if (a.dx != nullptr) store_dx<N, VECTOR>(a, out, turns, turn, count, g, rows, dot);
        out.advance();
    }
    source.finish();
    if (a.state == nullptr) return;
    if (gridDim.x > 1) let_second_pass_start();
    __syncthreads();
    const long long from = (long long)blockIdx.y * CHUNK;
    const Merged merged =
        sums.template merge<LANES, THREADS>(rest, reinterpret_cast<double*>(ring));
    if (gridDim.x > 1) {
        merged.template store<Layout::WIDTH, THREADS>(a.partials, rest, from);
    } else if (threadIdx.x < Layout::WIDTH && from + threadIdx.x < a.columns) {
        store_pair(a.result(), from + threadIdx.x, merged.sum, !merged.left, rest, threadIdx.x);
    }
}

// Longer blocks have no room for a ring.
template <typename T, typename N, bool VECTOR, int THREADS>
using WideSource = RowSource<T, N, VECTOR, THREADS <= 384 ? ROWS_AHEAD<T> : 0>;

// Rows of 257 to 8192 columns: a block holds TURN_ROWS rows, a thread always the same 8 columns.
template <typename T, typename N, bool VECTOR, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) backward_wide(NormArguments<T> a) {
    extern __shared__ __align__(16) double shared[];
    __shared__ ChunkSums<THREADS / 32, TURN_ROWS> chunks;
    const int column = threadIdx.x * ELEMENTS;
    const int count = elements_inside(column, a.columns);
    float weight[ELEMENTS];
    offset_weight(a.weight, a.weight_dtype, a.weight_stride, a.weight_offset, column, a.columns,
                  weight);
    WindowSums<ELEMENTS> sums;
    sums.clear(shared, blockDim.x);
    const Turns<TURN_ROWS> turns(a.rows, (long long)blockIdx.x * TURN_ROWS, 1,
                                 (long long)gridDim.x * TURN_ROWS);
    WideSource<T, N, VECTOR, THREADS> source(a, turns, column, blockDim.x,
                                             shared + sums.doubles(blockDim.x));
    GradientCursor<T, N> out(a, turns, column);
    const bool summed = a.state != nullptr && count > 0;
    chunks.clear();
    // Until the state is zero.
    if (a.state != nullptr) wait_for_first_pass();
    for (int turn = 0; turn < turns.of[0]; ++turn) {
        BackwardRow<T> rows[TURN_ROWS];
        float g[TURN_ROWS][ELEMENTS], contribution[TURN_ROWS][ELEMENTS], dots[TURN_ROWS];
        source.next(turn, rows);
        first_half<N, VECTOR>(a, ComputedActivations(), out, turns, turn, count, weight, rows, g,
                              contribution, dots);
        // The sums are added to while the block's warps come to the barrier.
        chunks.give(turn, dots);
        if (summed) sums.add(contribution, {a.state, a.columns}, column);
        if (a.dx != nullptr) {
            __syncthreads();
            store_dx<N, VECTOR>(a, out, turns, turn, count, g, rows, chunks.given(turn));
        }
        out.advance();
    }
    source.finish();
    if (a.state == nullptr) return;
    let_second_pass_start();
    sums.store(a.partials, {a.state, a.columns}, column);
}

// Longer rows: dx and dgate only; their column sums come from `backward_narrow`.
template <typename T, typename N>
__global__ void __launch_bounds__(WIDE_WARPS * 32) backward_long(NormArguments<T> a) {
    extern __shared__ float long_sums[];  // [chunks]
    float* dots = long_sums;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int chunks = (a.columns + CHUNK - 1) / CHUNK;
    for (long long row = blockIdx.x; row < a.rows; row += gridDim.x) {
        float m = 0.0f;
        for (int pass = 0; pass < 2; ++pass) {
            for (int chunk = warp; chunk < chunks; chunk += WIDE_WARPS) {
                const int column = chunk * CHUNK + lane * ELEMENTS;
                const int count = elements_inside(column, a.columns);
                float weight[ELEMENTS];
                offset_weight(a.weight, a.weight_dtype, a.weight_stride, a.weight_offset, column,
                              a.columns, weight);
                const Turns<TURN_ROWS> turns(a.rows, row, 0, a.rows);
                BackwardRow<T> r[TURN_ROWS];
                RowByRow<T, N, false>(a, turns, column, 0, nullptr).next(0, r);
                const BackwardTerms t =
                    backward_terms<N, false>(a, ComputedActivations(), r[0], count, weight);
                if (pass == 0) {
                    const float sum = chunk_tree<32>(lane_dot(t.g, t.xhat));
                    if (lane == 0) dots[chunk] = sum;
                    continue;
                }
                const GradientCursor<T, N> out(a, turns, column);
                if (N::GATED && a.dgate != nullptr) store<false>(out.dgate, count, t.dgate);
                if (a.dx == nullptr) continue;
                float beside[ELEMENTS], dx[ELEMENTS];
                if (N::RESIDUAL) unpack(r[0].beside, beside);
#pragma unroll
                for (int i = 0; i < ELEMENTS; ++i) {
                    dx[i] = input_gradient(t.g[i], t.xhat[i], r[0].rstd, m);
                    if (N::RESIDUAL) dx[i] = add(dx[i], beside[i]);
                }
                store<false>(out.dx, count, dx);
            }
            __syncthreads();
            if (pass == 0) m = divide(add_long_chunks(dots, chunks), a.length);
        }
    }
}

}  // namespace rlk
