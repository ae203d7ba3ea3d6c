// SPDX-License-Identifier: Apache-2.0
// Forward: one read of the tokens, one write.
#pragma once
#include "rlk_qwenimage/layer_norm_modulate/device_cuda.cuh"

namespace rlk {

// A lane's factors and shifts, of the sample that it saw last.
template <typename T> struct ModulationOfSample {
    float factors[ELEMENTS], shifts[ELEMENTS];
    long long sample = -1;

    // Of the sample of row `row` over all samples; a block has one sample at a time.
    __device__ __forceinline__ void follow(const Arguments<T>& a, long long now, int column) {
        if (now == sample) return;
        sample = now;
        factor<T>(a.scale, sample, column, a.columns, factors);
        a.shift.template load<T>(sample, column, a.columns, shifts);
    }
};

template <bool VECTOR, typename T>
__device__ __forceinline__ void store_out(const Arguments<T>& a, long long row, int column,
                                          int count, const Packed<T>& packed, float mean,
                                          float rstd, const ModulationOfSample<T>& by) {
    float x[ELEMENTS], xhat[ELEMENTS], out[ELEMENTS];
    unpack(packed, x);
    normalise(x, mean, rstd, count, xhat);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) out[i] = modulate(xhat[i], by.factors[i], by.shifts[i]);
    store<VECTOR>(a.out + row * a.columns + column, count, out);
}

// The next token; `sample` and `token` number its place.
struct Place {
    long long sample, token;

    __device__ __forceinline__ Place(long long row, long long tokens)
        : sample(row / tokens), token(row - row / tokens * tokens) {}
    __device__ __forceinline__ void advance(long long tokens) {
        if (++token < tokens) return;
        token = 0;
        ++sample;
    }
};

// Rows of at most 8192 columns: a block takes `per` of them one after another, TURN at a time; a
// warp holds one chunk of each.
template <typename T, bool VECTOR, int THREADS>
__global__ void __launch_bounds__(THREADS, THREADS <= 384 ? 3 : 1)
    forward_wide(Arguments<T> a, long long per) {
    __shared__ ChunkSums<THREADS / 32, TURN> chunks;
    const int column = threadIdx.x * ELEMENTS;
    const int count = elements_inside(column, a.columns);
    const long long first = blockIdx.x * per, rows = a.samples * a.tokens;
    const long long end = first + per < rows ? first + per : rows;
    ModulationOfSample<T> by;
    Place place(first, a.tokens);
    chunks.clear();
    int barrier = 0;
    for (long long row = first; row < end; row += TURN) {
        Packed<T> packed[TURN];
        long long sample[TURN];
        float x[TURN][ELEMENTS], sums[TURN], mean[TURN], rstd[TURN];
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
            const bool there = row + u < end;
            sample[u] = place.sample;
            packed[u] = Cursor<T>(a.x.of(there ? place.sample : 0), there ? place.token : 0, column, 0)
                            .template load<VECTOR>(there ? count : 0);
            place.advance(a.tokens);
            unpack(packed[u], x[u]);
            sums[u] = lane_sum(x[u]);
        }
        // A lane has the sum of row `threadIdx.x % TURN`.
        const float own_mean = divide(chunks.total(barrier++, sums), a.length);
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
            mean[u] = __shfl_sync(0xffffffffu, own_mean, u);
            float centred[ELEMENTS];
            centre(x[u], mean[u], count, centred);
            sums[u] = lane_dot(centred, centred);
        }
        const float own_rstd = inverse_deviation(chunks.total(barrier++, sums), a.length, a.eps);
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
            rstd[u] = __shfl_sync(0xffffffffu, own_rstd, u);
            if (row + u >= end) break;
            if (threadIdx.x == u) {
                a.mean_out[row + u] = own_mean;
                a.rstd_out[row + u] = own_rstd;
            }
            by.follow(a, sample[u], column);
            store_out<VECTOR>(a, row + u, column, count, packed[u], mean[u], rstd[u], by);
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
    extern __shared__ float long_sums[];  // [chunks]
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
            centre(x, mean, count, centred);
            return lane_dot(centred, centred);
        });
        const float rstd = inverse_deviation(squares, a.length, a.eps);
        for (int column = threadIdx.x * ELEMENTS; column < a.columns;
             column += blockDim.x * ELEMENTS) {
            const int count = elements_inside(column, a.columns);
            ModulationOfSample<T> by;
            by.follow(a, place.sample, column);
            store_out<false>(a, row, column, count, load_long(tokens, place.token, column, count),
                             mean, rstd, by);
        }
        if (threadIdx.x == 0) {
            a.mean_out[row] = mean;
            a.rstd_out[row] = rstd;
        }
    }
}

}  // namespace rlk
