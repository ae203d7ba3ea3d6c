// SPDX-License-Identifier: Apache-2.0
// The public steps of an exact sum in CUDA: add rows, normalise, round. Bits as in golden.py.
#include "rlk_exact_sum.h"

#include "rlk/cuda/rows.cuh"
#include "rlk/reduce/exact_sum/kernel_round.cuh"
#include "rlk/reduce/exact_sum/window_cuda.cuh"

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

__global__ void __launch_bounds__(THREADS) normalise(ExactState state) {
    const long long column = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (column >= state.columns) return;
    long long limb[LIMBS];
    load_limbs(state, column, limb);
    for (int i = 0; i < LIMBS; ++i) state.data[i * state.columns + column] = limb[i];
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

int rlk_exact_sum_normalise(const ExactSumState* a) {
    rlk::DeviceGuard guard(a->device);
    if (guard.error() != cudaSuccess) return guard.error();
    rlk::normalise<<<rlk::blocks(a->columns), rlk::THREADS, 0,
                     static_cast<cudaStream_t>(a->stream)>>>({a->state, a->columns});
    return cudaGetLastError();
}

int rlk_exact_sum_round(const ExactSumState* a) {
    rlk::DeviceGuard guard(a->device);
    if (guard.error() != cudaSuccess) return guard.error();
    return rlk::launch_round({a->state, a->columns}, a->dtype, a->out,
                             static_cast<cudaStream_t>(a->stream));
}
