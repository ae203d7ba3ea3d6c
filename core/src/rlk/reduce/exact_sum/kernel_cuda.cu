// SPDX-License-Identifier: Apache-2.0
// The public steps of an exact sum in CUDA: add rows, sum them, normalise, round. Bits as in
// golden.py.
#include "rlk_exact_sum.h"

#include "rlk/cuda/rows.cuh"
#include "rlk/reduce/exact_sum/device_rows.cuh"

namespace rlk {
namespace {

// 256: columns of a block, one for each thread, so that a warp reads neighbours.
constexpr int THREADS = 256;
// 512: rows of a block; enough blocks for any GPU, few enough atomics.
constexpr int BLOCK_ROWS = 512;

template <typename T>
__global__ void __launch_bounds__(THREADS) add_rows(Rows<T> rows, long long count,
                                                    ExactState state) {
    extern __shared__ double shared[];
    WindowSums<1> sums;
    sums.clear(shared, THREADS);
    const long long column = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (column >= state.columns) return;
    for (long long first = (long long)blockIdx.y * BLOCK_ROWS; first < count;
         first += (long long)gridDim.y * BLOCK_ROWS) {
        const long long end = first + BLOCK_ROWS < count ? first + BLOCK_ROWS : count;
        for (long long row = first; row < end; ++row) {
            const long long at = row * rows.row_stride + column * rows.column_stride;
            const float term[1][1] = {{to_float(rows.data[at])}};
            sums.add(term, state, column);
        }
    }
    sums.flush(state, column);
}

template <typename T>
__global__ void __launch_bounds__(THREADS) sum_rows(Rows<T> rows, long long count,
                                                    SumResult result) {
    extern __shared__ double shared[];
    const long long column = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (column < result.state.columns) sum_few_rows<THREADS>(rows, count, column, shared, result);
}

// The sums of a state, normalised or not.
__global__ void __launch_bounds__(THREADS) finish(ExactState state, SumResult result) {
    const long long column = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (column < state.columns) finish_state(state, column, column, result);
}

unsigned blocks(long long columns) { return (unsigned)((columns + THREADS - 1) / THREADS); }

}  // namespace
}  // namespace rlk

// state [13, columns] += rows [count, columns]; carries are left to normalise.
int rlk_exact_sum_add_rows(const ExactSumRows* a) {
    rlk::DeviceGuard guard(a->device);
    if (guard.error() != cudaSuccess) return guard.error();
    const rlk::ExactState state{a->state, a->columns};
    // 65 535: the largest second dimension of a grid; further rows are looped over.
    const long long tall = (a->count + rlk::BLOCK_ROWS - 1) / rlk::BLOCK_ROWS;
    const dim3 grid(rlk::blocks(a->columns), (unsigned)(tall < 65535 ? tall : 65535));
    const int shared = rlk::WindowSums<1>::doubles(rlk::THREADS) * (int)sizeof(double);
    return rlk::by_dtype(a->dtype, [&](auto zero) {
        using T = decltype(zero);
        const rlk::Rows<T> rows{static_cast<const T*>(a->rows), a->row_stride, a->column_stride};
        rlk::add_rows<T><<<grid, rlk::THREADS, shared, static_cast<cudaStream_t>(a->stream)>>>(
            rows, a->count, state);
        return cudaGetLastError();
    });
}

// The results of rows [count, columns], of few rows, in the form that is asked for.
int rlk_exact_sum_sum_rows(const ExactSumFinish* a) {
    rlk::DeviceGuard guard(a->device);
    if (guard.error() != cudaSuccess) return guard.error();
    const rlk::SumResult result{{a->state, a->columns}, a->sums, a->sums_dtype, a->form};
    return rlk::by_dtype(a->dtype, [&](auto zero) {
        using T = decltype(zero);
        const rlk::Rows<T> rows{static_cast<const T*>(a->source), a->row_stride, a->column_stride};
        constexpr int bytes = rlk::few_rows_bytes<rlk::THREADS>();
        rlk::sum_rows<T><<<rlk::blocks(a->columns), rlk::THREADS, bytes,
                           static_cast<cudaStream_t>(a->stream)>>>(rows, a->count, result);
        return cudaGetLastError();
    });
}

// The results of a state, which may be that of the result.
int rlk_exact_sum_finish(const ExactSumFinish* a) {
    rlk::DeviceGuard guard(a->device);
    if (guard.error() != cudaSuccess) return guard.error();
    const rlk::ExactState state{static_cast<long long*>(const_cast<void*>(a->source)), a->columns};
    rlk::finish<<<rlk::blocks(a->columns), rlk::THREADS, 0,
                  static_cast<cudaStream_t>(a->stream)>>>(
        state, {{a->state, a->columns}, a->sums, a->sums_dtype, a->form});
    return cudaGetLastError();
}
