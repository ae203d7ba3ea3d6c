// SPDX-License-Identifier: Apache-2.0
// The sums of so few rows that a thread has all of a column, finished: there is no state to add to.
#pragma once
#include "rlk/reduce/exact_sum/device_round.cuh"
#include "rlk/reduce/exact_sum/window_cuda.cuh"

namespace rlk {

// Shared memory of a block: windows, and what fits none of them, for each thread's column.
template <int THREADS> __host__ __device__ constexpr int few_rows_bytes() {
    return (WindowSums<1>::doubles(THREADS) + STATE_ROWS * THREADS) * (int)sizeof(double);
}

// One column of rows. No barrier: of shared memory, too, a thread has a column of its own.
template <int THREADS, typename T>
__device__ __forceinline__ void sum_few_rows(Rows<T> rows, long long count, long long column,
                                             double* shared, const SumResult& result) {
    WindowSums<1> sums;
    sums.clear(shared, THREADS);
    const ExactState rest{
        reinterpret_cast<long long*>(shared + WindowSums<1>::doubles(THREADS)), THREADS};
    for (int i = 0; i < STATE_ROWS; ++i) rest.data[i * THREADS + threadIdx.x] = 0;
    for (long long row = 0; row < count; ++row) {
        const long long at = row * rows.row_stride + column * rows.column_stride;
        const float term[1][1] = {{to_float(rows.data[at])}};
        sums.add(term, rest, threadIdx.x);
    }
    sums.flush(rest, threadIdx.x);
    finish_state(rest, threadIdx.x, column, result);
}

}  // namespace rlk
