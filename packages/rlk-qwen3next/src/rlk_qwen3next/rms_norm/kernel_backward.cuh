// SPDX-License-Identifier: Apache-2.0
// Backward of the RMS norms: one read of every row, dx, dgate and the exact dweight.
#pragma once
#include <cuda_pipeline.h>

#include <type_traits>

#include "rlk/reduce/exact_sum/kernel_combine.cuh"
#include "rlk_qwen3next/rms_norm/kernel_forward.cuh"

namespace rlk {

// One row's operands of a lane, as loaded.
template <typename T> struct BackwardRow {
    Packed<T> dy, x, gate;
    float rstd;
};

// Rows on their way: a thread copies its own share of the next rows to shared memory while it
// works on this one, so that many bytes are in flight without holding registers.
template <typename T, bool GATED> struct RowRing {
    // 4 rows ahead of 2-byte elements, 2 of FP32: the same bytes in flight.
    static constexpr int STAGES = 8 / sizeof(T) > 2 ? 4 : 2;
    static constexpr int TENSORS = GATED ? 3 : 2;
    static constexpr int WORDS = sizeof(Packed<T>) / sizeof(uint4);

    uint4* words;  // [STAGES][TENSORS * WORDS][threads], this thread's
    float* rstds;  // [STAGES][threads], this thread's
    int threads, slot;

    static int bytes(int threads) {
        return STAGES * threads * (TENSORS * WORDS * (int)sizeof(uint4) + (int)sizeof(float));
    }
    __device__ __forceinline__ void place(void* shared) {
        threads = blockDim.x;
        slot = 0;
        words = static_cast<uint4*>(shared) + threadIdx.x;
        rstds = reinterpret_cast<float*>(static_cast<uint4*>(shared) +
                                         STAGES * TENSORS * WORDS * threads) +
                threadIdx.x;
    }
    __device__ __forceinline__ void copy(const NormArguments<T>& a, const Rows<T>& source,
                                         int tensor, long long row, int column, int slot) const {
        const size_t skip = row < a.rows && column < a.columns ? 0 : sizeof(uint4);
        const uint4* from = reinterpret_cast<const uint4*>(
            skip ? source.data : source.data + row * source.row_stride + column);
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            __pipeline_memcpy_async(words + ((slot * TENSORS + tensor) * WORDS + w) * threads,
                                    from + (skip ? 0 : w), sizeof(uint4), skip);
        }
    }
    __device__ __forceinline__ void fetch(const NormArguments<T>& a, long long row, int column,
                                          int slot) const {
        copy(a, a.dy, 0, row, column, slot);
        copy(a, a.x, 1, row, column, slot);
        if (GATED) copy(a, a.gate, 2, row, column, slot);
        const bool inside = row < a.rows;
        __pipeline_memcpy_async(rstds + slot * threads,
                                a.rstd + (inside ? row * a.rstd_stride : 0), sizeof(float),
                                inside ? 0 : sizeof(float));
        __pipeline_commit();
    }
    __device__ __forceinline__ Packed<T> read(int tensor) const {
        Packed<T> packed;
        uint4* to = reinterpret_cast<uint4*>(&packed);
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            to[w] = words[((slot * TENSORS + tensor) * WORDS + w) * threads];
        }
        return packed;
    }
    __device__ __forceinline__ void start(const NormArguments<T>& a, long long row, int column,
                                          long long step) {
        for (int s = 0; s < STAGES; ++s) fetch(a, row + s * step, column, s);
    }
    // The row in front, whose place is then given to the row STAGES steps later.
    __device__ __forceinline__ BackwardRow<T> next(const NormArguments<T>& a, long long row,
                                                   int column, long long step) {
        __pipeline_wait_prior(STAGES - 1);
        BackwardRow<T> r;
        r.dy = read(0);
        r.x = read(1);
        if (GATED) r.gate = read(2);
        r.rstd = rstds[slot * threads];
        fetch(a, row + STAGES * step, column, slot);
        slot = (slot + 1) % STAGES;
        return r;
    }
};

// Where a ring does not fit or words cannot be read: the next row waits in registers.
template <typename T, bool GATED, bool VECTOR> struct RowByRow {
    BackwardRow<T> ahead;

    static int bytes(int) { return 0; }
    __device__ __forceinline__ void place(void*) {}
    __device__ __forceinline__ static BackwardRow<T> load(const NormArguments<T>& a,
                                                          long long row, int column) {
        const bool inside = row < a.rows;
        const int columns = inside ? a.columns : 0;
        BackwardRow<T> r;
        r.dy = a.dy.template load<VECTOR>(row, column, columns);
        r.x = a.x.template load<VECTOR>(row, column, columns);
        if (GATED) r.gate = a.gate.template load<VECTOR>(row, column, columns);
        r.rstd = inside ? a.rstd[row * a.rstd_stride] : 0.0f;
        return r;
    }
    __device__ __forceinline__ void start(const NormArguments<T>& a, long long row, int column,
                                          long long) {
        ahead = load(a, row, column);
    }
    __device__ __forceinline__ BackwardRow<T> next(const NormArguments<T>& a, long long row,
                                                   int column, long long step) {
        const BackwardRow<T> r = ahead;
        ahead = load(a, row + step, column);
        return r;
    }
};

template <typename T, bool GATED, bool VECTOR, int THREADS>
using RowSource = std::conditional_t<VECTOR && THREADS <= 256, RowRing<T, GATED>,
                                     RowByRow<T, GATED, VECTOR>>;

// What a lane knows of a row before the row dot product is complete.
struct BackwardTerms {
    float g[ELEMENTS], xhat[ELEMENTS], contribution[ELEMENTS], dgate[ELEMENTS];
};

template <bool GATED, typename T>
__device__ __forceinline__ BackwardTerms backward_terms(const NormArguments<T>& a,
                                                        const BackwardRow<T>& r,
                                                        const float (&weight)[ELEMENTS]) {
    float dy[ELEMENTS], x[ELEMENTS], z[ELEMENTS];
    unpack(r.dy, dy);
    unpack(r.x, x);
    if (GATED) unpack(r.gate, z);
    BackwardTerms t;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        t.xhat[i] = multiply(x[i], r.rstd);
        t.g[i] = multiply(dy[i], weight[i]);
        t.contribution[i] = multiply(dy[i], t.xhat[i]);
        if (GATED) {
            const Activation act = activate_both(z[i], a.silu);
            t.dgate[i] = multiply(multiply(t.contribution[i], weight[i]), act.derivative);
            t.g[i] = multiply(t.g[i], act.value);
            t.contribution[i] = multiply(t.contribution[i], act.value);
        }
    }
    return t;
}

template <bool GATED, bool VECTOR, typename T>
__device__ __forceinline__ void store_dgate(const NormArguments<T>& a, long long row, int column,
                                            const BackwardTerms& t) {
    if (GATED && a.dgate != nullptr) store<VECTOR>(a.dgate, row, column, a.columns, t.dgate);
}

// Beyond the row there is no column: what padding times a NaN of `rstd` gives must not count.
template <bool VECTOR, typename T>
__device__ __forceinline__ void add_contributions(const NormArguments<T>& a,
                                                  ColumnSums<ELEMENTS>& sums, BackwardTerms& t,
                                                  int column) {
    if (column >= a.columns) return;
    if (!VECTOR) {
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) {
            if (column + i >= a.columns) t.contribution[i] = 0.0f;
        }
    }
    sums.add(t.contribution, {a.state, a.columns}, column);
}

template <bool VECTOR, typename T>
__device__ __forceinline__ void store_dx(const NormArguments<T>& a, long long row, int column,
                                         const BackwardTerms& t, float rstd, float dot) {
    if (a.dx == nullptr) return;
    const float m = divide(dot, (float)a.columns);
    float dx[ELEMENTS];
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) dx[i] = input_gradient(t.g[i], t.xhat[i], rstd, m);
    store<VECTOR>(a.dx, row, column, a.columns, dx);
}

// Rows of at most 256 columns, or 256 columns of longer rows where only their sums are wanted:
// blockIdx.y is the chunk, LANES neighbouring lanes hold a row of it.
template <typename T, bool GATED, bool VECTOR, int LANES>
__global__ void __launch_bounds__(NARROW_THREADS, 2) backward_narrow(NormArguments<T> a) {
    extern __shared__ double shared[];
    constexpr int GROUPS = NARROW_THREADS / LANES;
    const int column = blockIdx.y * CHUNK + (threadIdx.x % LANES) * ELEMENTS;
    const int group = threadIdx.x / LANES;
    const ExactState state{a.state, a.columns};
    float weight[ELEMENTS];
    offset_weight(a.weight, a.weight_dtype, a.weight_stride, a.weight_offset, column, a.columns,
                  weight);
    ColumnSums<ELEMENTS> sums;
    sums.clear(shared);
    RowSource<T, GATED, VECTOR, NARROW_THREADS> source;
    source.place(shared + ColumnSums<ELEMENTS>::deeper_doubles(NARROW_THREADS));
    const long long step = (long long)gridDim.x * GROUPS;
    long long base = (long long)blockIdx.x * GROUPS;
    source.start(a, base + group, column, step);
    for (; base < a.rows; base += step) {
        const long long row = base + group;
        const BackwardRow<T> r = source.next(a, row, column, step);
        BackwardTerms t = backward_terms<GATED>(a, r, weight);
        if (row < a.rows) store_dgate<GATED, VECTOR>(a, row, column, t);
        if (a.state != nullptr) add_contributions<VECTOR>(a, sums, t, column);
        const float dot = chunk_tree<LANES>(lane_dot(t.g, t.xhat));
        if (row < a.rows) store_dx<VECTOR>(a, row, column, t, r.rstd, dot);
    }
    if (a.state == nullptr) return;
    sums.flush_deeper(state, column);
    // The groups' sums of a column meet in shared memory, in the place of the deeper levels.
    __syncthreads();
    double* level = shared;                              // [GROUPS][LANES * ELEMENTS]
    double* deeper = shared + GROUPS * LANES * ELEMENTS; // [DEEPER_LEVELS][LANES * ELEMENTS]
    constexpr int WIDTH = LANES * ELEMENTS;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        level[group * WIDTH + (threadIdx.x % LANES) * ELEMENTS + i] = sums.level[i];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < WIDTH; c += NARROW_THREADS) {
        const int at = blockIdx.y * CHUNK + c;
        if (at >= a.columns) break;
        for (int d = 0; d < DEEPER_LEVELS; ++d) deeper[d * WIDTH + c] = 0.0;
        double sum = level[c];
        for (int other = 1; other < GROUPS; ++other) {
            sum = add_exactly(sum, level[other * WIDTH + c], deeper + c, WIDTH, state, at);
        }
        for (int d = 0; d < DEEPER_LEVELS; ++d) state.add_exact(at, deeper[d * WIDTH + c]);
        a.partial[(long long)blockIdx.x * a.columns + at] = sum;
    }
}

// Rows of 257 to 8192 columns: a block holds a row, a thread always the same 8 columns.
template <typename T, bool GATED, bool VECTOR, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) backward_wide(NormArguments<T> a) {
    extern __shared__ double shared[];
    __shared__ float dots[2][WIDE_WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int column = threadIdx.x * ELEMENTS;
    const ExactState state{a.state, a.columns};
    float weight[ELEMENTS];
    offset_weight(a.weight, a.weight_dtype, a.weight_stride, a.weight_offset, column, a.columns,
                  weight);
    ColumnSums<ELEMENTS> sums;
    sums.clear(shared);
    RowSource<T, GATED, VECTOR, THREADS> source;
    source.place(shared + ColumnSums<ELEMENTS>::deeper_doubles(blockDim.x));
    int parity = 0;
    source.start(a, blockIdx.x, column, gridDim.x);
    for (long long row = blockIdx.x; row < a.rows; row += gridDim.x, parity ^= 1) {
        const BackwardRow<T> r = source.next(a, row, column, gridDim.x);
        BackwardTerms t = backward_terms<GATED>(a, r, weight);
        const float chunk = chunk_tree<32>(lane_dot(t.g, t.xhat));
        if (lane == 0) dots[parity][warp] = chunk;
        store_dgate<GATED, VECTOR>(a, row, column, t);
        if (a.state != nullptr) add_contributions<VECTOR>(a, sums, t, column);
        __syncthreads();
        store_dx<VECTOR>(a, row, column, t, r.rstd, add_chunks(dots[parity], warps));
    }
    if (a.state == nullptr) return;
    sums.flush_deeper(state, column);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        if (column + i < a.columns) {
            a.partial[(long long)blockIdx.x * a.columns + column + i] = sums.level[i];
        }
    }
}

// Longer rows: dx and dgate only; their column sums come from `backward_narrow`.
template <typename T, bool GATED>
__global__ void __launch_bounds__(WIDE_WARPS * 32) backward_long(NormArguments<T> a) {
    extern __shared__ float long_sums[];  // [chunks]
    float* dots = long_sums;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int chunks = (a.columns + CHUNK - 1) / CHUNK;
    for (long long row = blockIdx.x; row < a.rows; row += gridDim.x) {
        float dot = 0.0f;
        for (int pass = 0; pass < 2; ++pass) {
            for (int chunk = warp; chunk < chunks; chunk += WIDE_WARPS) {
                const int column = chunk * CHUNK + lane * ELEMENTS;
                float weight[ELEMENTS];
                offset_weight(a.weight, a.weight_dtype, a.weight_stride, a.weight_offset, column,
                              a.columns, weight);
                const BackwardRow<T> r = RowByRow<T, GATED, false>::load(a, row, column);
                const BackwardTerms t = backward_terms<GATED>(a, r, weight);
                if (pass == 0) {
                    const float sum = chunk_tree<32>(lane_dot(t.g, t.xhat));
                    if (lane == 0) dots[chunk] = sum;
                } else {
                    store_dgate<GATED, false>(a, row, column, t);
                    store_dx<false>(a, row, column, t, r.rstd, dot);
                }
            }
            __syncthreads();
            if (pass == 0) dot = add_chunks(dots, chunks);
        }
    }
}

}  // namespace rlk
