// SPDX-License-Identifier: Apache-2.0
// Forward: one read of the tokens, one write.
#pragma once
#include "rlk_qwenimage/layer_norm_modulate/row_source.cuh"

namespace rlk {

// A lane's factors and shifts of one sample.
template <typename T> struct ModulationOfSample {
    float factors[ELEMENTS], shifts[ELEMENTS];

    __device__ __forceinline__ void load(const Arguments<T>& a, long long sample, int column) {
        const Packed<T> scale = a.scale.template load<T>(sample, column, a.columns);
        const Packed<T> shift = a.shift.template load<T>(sample, column, a.columns);
        factor<T>(scale, factors);
        unpack(shift, shifts);
    }
};

// xhat * (1 + scale) + shift of x - mean.
template <bool VECTOR, typename T>
__device__ __forceinline__ void store_out(T* at, int count, const float (&centred)[ELEMENTS],
                                          float rstd, const ModulationOfSample<T>& by) {
    float out[ELEMENTS];
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        out[i] = modulate(multiply(centred[i], rstd), by.factors[i], by.shifts[i]);
    }
    store<VECTOR>(at, count, out);
}

// Rows of at most 8192 columns: a block takes `per` of them one after another, some at a time; a warp
// holds one chunk of each.
template <typename T, bool VECTOR, int THREADS>
__global__ void __launch_bounds__(THREADS, THREADS <= 384 ? 768 / THREADS : 1)
    forward_wide(const __grid_constant__ Arguments<T> a, long long per) {
    constexpr int TOGETHER = FORWARD_TURN<THREADS>;
    __shared__ ChunkSums<THREADS / 32, TOGETHER> chunks;
    const int column = threadIdx.x * ELEMENTS;
    const int count = elements_inside(column, a.columns);
    const long long first = blockIdx.x * per, rows = a.samples * a.tokens;
    long long left = rows - first < per ? rows - first : per;
    const Place place(first, a.tokens);
    RowSource<T, VECTOR, THREADS> source(RowCursor<T>(a, place, left, column),
                                         launched_memory<uint4>());
    long long sample = place.sample, within = a.tokens - place.token;  // of the row to store next
    ModulationOfSample<T> by;
    by.load(a, sample, column);
    T* out = a.out + first * a.columns + column;
    const int own = threadIdx.x % TOGETHER;
    float* statistic = (threadIdx.x < TOGETHER ? a.mean_out : a.rstd_out) + first + own;
    chunks.clear();
    for (int barrier = 0; left > 0; left -= TOGETHER) {
        float x[TOGETHER][ELEMENTS], sums[TOGETHER];
        source.next(x);
#pragma unroll
        for (int u = 0; u < TOGETHER; ++u) sums[u] = lane_sum(x[u]);
        // A lane has the sum of row `threadIdx.x % TOGETHER`.
        const float own_mean = divide(chunks.total(barrier++, sums), a.length);
#pragma unroll
        for (int u = 0; u < TOGETHER; ++u) {
            centre(VECTOR, x[u], __shfl_sync(0xffffffffu, own_mean, u), count, x[u]);
            sums[u] = lane_dot(x[u], x[u]);
        }
        const float own_rstd = inverse_deviation(chunks.total(barrier++, sums), a.length, a.eps);
        if (threadIdx.x < 2 * TOGETHER && own < left) {
            *statistic = threadIdx.x < TOGETHER ? own_mean : own_rstd;
        }
        statistic += TOGETHER;
#pragma unroll
        for (int u = 0; u < TOGETHER; ++u) {
            const float rstd = __shfl_sync(0xffffffffu, own_rstd, u);
            if (u >= left) break;
            if (within == 0) {
                by.load(a, ++sample, column);
                within = a.tokens;
            }
            --within;
            store_out<VECTOR>(out, count, x[u], rstd, by);
            out += a.columns;
        }
    }
}

// A function of the chunks of a long row, warps taking turns: `sum(column, count)` of a lane's
// elements is added up by chunk. Whole blocks call.
template <typename Sum>
__device__ __forceinline__ float sum_long(float* sums, int columns, Sum sum) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int chunks = (columns + CHUNK - 1) / CHUNK;
    for (int chunk = warp; chunk < chunks; chunk += WIDE_WARPS) {
        const int column = chunk * CHUNK + lane * ELEMENTS;
        const float total = chunk_tree<32>(sum(column, elements_inside(column, columns)));
        if (lane == 0) sums[chunk] = total;
    }
    __syncthreads();
    const float total = add_long_chunks(sums, chunks);
    __syncthreads();
    return total;
}

template <typename T>
__device__ __forceinline__ Packed<T> load_long(const Rows<T>& rows, long long token, int column,
                                               int count) {
    return Cursor<T>(rows, token, column, 0).template load<false>(count);
}

// Longer rows: the row is read three times, from cache.
template <typename T>
__global__ void __launch_bounds__(WIDE_WARPS * 32) forward_long(Arguments<T> a) {
    float* long_sums = launched_memory<float>();  // [chunks]
    const long long rows = a.samples * a.tokens;
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const Place place(row, a.tokens);
        const Rows<T> tokens = a.x.of(place.sample);
        const float mean = divide(sum_long(long_sums, a.columns, [&](int column, int count) {
            float x[ELEMENTS];
            unpack(load_long(tokens, place.token, column, count), x);
            return lane_sum(x);
        }), a.length);
        const float squares = sum_long(long_sums, a.columns, [&](int column, int count) {
            float x[ELEMENTS], centred[ELEMENTS];
            unpack(load_long(tokens, place.token, column, count), x);
            centre(false, x, mean, count, centred);
            return lane_dot(centred, centred);
        });
        const float rstd = inverse_deviation(squares, a.length, a.eps);
        for (int column = threadIdx.x * ELEMENTS; column < a.columns;
             column += blockDim.x * ELEMENTS) {
            const int count = elements_inside(column, a.columns);
            ModulationOfSample<T> by;
            by.load(a, place.sample, column);
            float x[ELEMENTS];
            unpack(load_long(tokens, place.token, column, count), x);
            centre(false, x, mean, count, x);
            store_out<false>(a.out + row * a.columns + column, count, x, rstd, by);
        }
        if (threadIdx.x == 0) {
            a.mean_out[row] = mean;
            a.rstd_out[row] = rstd;
        }
    }
}

}  // namespace rlk
