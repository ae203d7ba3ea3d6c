// SPDX-License-Identifier: Apache-2.0
// Forward of the RMS norms: one read of the rows, one write.
#pragma once
#include "rlk_qwen3next/rms_norm/device_cuda.cuh"

namespace rlk {

// 256: threads of a block of narrow rows. Grids are chosen freely: no bit depends on them.
constexpr int NARROW_THREADS = 256;
// 2: rows that a lane group loads before it computes, to keep enough bytes in flight.
constexpr int FORWARD_ROWS = 2;
// 32 warps of one chunk each: the longest row whose values stay in registers.
constexpr int WIDE_WARPS = 32;

template <bool GATED, bool VECTOR, typename T>
__device__ __forceinline__ void store_forward(const NormArguments<T>& a, long long row,
                                              int column, const float (&x)[ELEMENTS],
                                              const Packed<T>& gate, float rstd,
                                              const float (&weight)[ELEMENTS]) {
    float y[ELEMENTS], z[ELEMENTS];
    if (GATED) unpack(gate, z);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        y[i] = multiply(multiply(x[i], rstd), weight[i]);
        if (GATED) y[i] = multiply(y[i], activate(z[i], a.silu));
    }
    store<VECTOR>(a.y, row, column, a.columns, y);
}

// Rows of at most 256 columns: LANES neighbouring lanes hold a row.
template <typename T, bool GATED, bool VECTOR, int LANES>
__global__ void __launch_bounds__(NARROW_THREADS) forward_narrow(NormArguments<T> a) {
    constexpr int GROUPS = NARROW_THREADS / LANES;
    const int column = (threadIdx.x % LANES) * ELEMENTS;
    const int group = threadIdx.x / LANES;
    float weight[ELEMENTS];
    offset_weight(a.weight, a.weight_dtype, a.weight_stride, a.weight_offset, column, a.columns,
                  weight);
    const long long step = (long long)gridDim.x * GROUPS * FORWARD_ROWS;
    for (long long base = (long long)blockIdx.x * GROUPS * FORWARD_ROWS; base < a.rows;
         base += step) {
        Packed<T> x[FORWARD_ROWS], gate[FORWARD_ROWS];
#pragma unroll
        for (int u = 0; u < FORWARD_ROWS; ++u) {
            const long long row = base + u * GROUPS + group;
            const int columns = row < a.rows ? a.columns : 0;
            x[u] = a.x.template load<VECTOR>(row, column, columns);
            if (GATED) gate[u] = a.gate.template load<VECTOR>(row, column, columns);
        }
#pragma unroll
        for (int u = 0; u < FORWARD_ROWS; ++u) {
            const long long row = base + u * GROUPS + group;
            float values[ELEMENTS];
            unpack(x[u], values);
            const float sum = chunk_tree<LANES>(lane_dot(values, values));
            const float rstd = inverse_rms(sum, a.columns, a.eps);
            if (row >= a.rows) continue;
            store_forward<GATED, VECTOR>(a, row, column, values, gate[u], rstd, weight);
            if (column == 0) a.rstd_out[row] = rstd;
        }
    }
}

// ORDER: chunk sums ascending, from +0
__device__ __forceinline__ float add_chunks(const float* sums, int chunks) {
    float total = 0.0f;
    for (int i = 0; i < chunks; ++i) total = add(total, sums[i]);
    return total;
}

// Rows of 257 to 8192 columns: a block holds a row, a warp one chunk of it.
template <typename T, bool GATED, bool VECTOR, int THREADS>
__global__ void __launch_bounds__(THREADS) forward_wide(NormArguments<T> a) {
    __shared__ float sums[2][WIDE_WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int column = threadIdx.x * ELEMENTS;
    float weight[ELEMENTS];
    offset_weight(a.weight, a.weight_dtype, a.weight_stride, a.weight_offset, column, a.columns,
                  weight);
    int parity = 0;
    for (long long row = blockIdx.x; row < a.rows; row += gridDim.x, parity ^= 1) {
        const Packed<T> x = a.x.template load<VECTOR>(row, column, a.columns);
        Packed<T> gate;
        if (GATED) gate = a.gate.template load<VECTOR>(row, column, a.columns);
        float values[ELEMENTS];
        unpack(x, values);
        const float chunk = chunk_tree<32>(lane_dot(values, values));
        if (lane == 0) sums[parity][warp] = chunk;
        // One barrier a row: the other half of `sums` serves the next row.
        __syncthreads();
        const float rstd = inverse_rms(add_chunks(sums[parity], warps), a.columns, a.eps);
        store_forward<GATED, VECTOR>(a, row, column, values, gate, rstd, weight);
        if (threadIdx.x == 0) a.rstd_out[row] = rstd;
    }
}

// Longer rows: warps take turns at chunks, and the row is read twice, from cache.
template <typename T, bool GATED>
__global__ void __launch_bounds__(WIDE_WARPS * 32) forward_long(NormArguments<T> a) {
    extern __shared__ float long_sums[];  // [chunks]
    float* sums = long_sums;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int chunks = (a.columns + CHUNK - 1) / CHUNK;
    for (long long row = blockIdx.x; row < a.rows; row += gridDim.x) {
        for (int chunk = warp; chunk < chunks; chunk += WIDE_WARPS) {
            float values[ELEMENTS];
            unpack(a.x.template load<false>(row, chunk * CHUNK + lane * ELEMENTS, a.columns),
                   values);
            const float sum = chunk_tree<32>(lane_dot(values, values));
            if (lane == 0) sums[chunk] = sum;
        }
        __syncthreads();
        const float rstd = inverse_rms(add_chunks(sums, chunks), a.columns, a.eps);
        __syncthreads();
        for (int chunk = warp; chunk < chunks; chunk += WIDE_WARPS) {
            const int column = chunk * CHUNK + lane * ELEMENTS;
            float values[ELEMENTS], weight[ELEMENTS];
            unpack(a.x.template load<false>(row, column, a.columns), values);
            Packed<T> gate;
            if (GATED) gate = a.gate.template load<false>(row, column, a.columns);
            offset_weight(a.weight, a.weight_dtype, a.weight_stride, a.weight_offset, column,
                          a.columns, weight);
            store_forward<GATED, false>(a, row, column, values, gate, rstd, weight);
        }
        if (threadIdx.x == 0) a.rstd_out[row] = rstd;
    }
}

}  // namespace rlk
