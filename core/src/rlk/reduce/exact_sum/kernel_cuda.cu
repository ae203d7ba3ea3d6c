// SPDX-License-Identifier: Apache-2.0
// The public steps of an exact sum in CUDA: add rows, normalise, round. Bits as in golden.py.
#include "rlk_exact_sum.h"

#include "rlk/cuda/rows.cuh"
#include "rlk/reduce/exact_sum/device_cuda.cuh"

namespace rlk {
namespace {

// 256: columns of a block, one for each thread, so that a warp reads neighbours.
constexpr int THREADS = 256;
// 512: rows of a block; enough blocks for any GPU, few enough atomics.
constexpr int BLOCK_ROWS = 512;

struct Format {
    int precision, lowest_bit;
    uint32_t infinity, sign;
};

__device__ __forceinline__ Format format_of(int dtype) {
    if (dtype == kBFloat16) return {8, 149 - 133, 0x7f80u, 0x8000u};
    if (dtype == kFloat16) return {11, 149 - 24, 0x7c00u, 0x8000u};
    return {24, 0, 0x7f800000u, 0x80000000u};
}

template <typename T>
__global__ void __launch_bounds__(THREADS) add_rows(Rows<T> rows, long long count,
                                                    ExactState state) {
    extern __shared__ double shared[];
    ColumnSums<1> sums;
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

__device__ __forceinline__ void load_limbs(ExactState state, long long column,
                                           long long (&limb)[LIMBS]) {
    for (int i = 0; i < LIMBS; ++i) limb[i] = state.data[i * state.columns + column];
    normalise_limbs(limb);
}

__global__ void __launch_bounds__(THREADS) normalise(ExactState state) {
    const long long column = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (column >= state.columns) return;
    long long limb[LIMBS];
    load_limbs(state, column, limb);
    for (int i = 0; i < LIMBS; ++i) state.data[i * state.columns + column] = limb[i];
}

// 32 bits of a non-negative sum from bit `place` up; `place` may be negative.
__device__ uint32_t bits_from(const long long (&limb)[LIMBS], int place) {
    uint64_t pair = 0;
    const int first = place >> 5;
    for (int i = 1; i >= 0; --i) {
        const int at = first + i;
        pair = pair << 32 | (at >= 0 && at < LIMBS ? (uint64_t)limb[at] & 0xffffffffu : 0u);
    }
    return (uint32_t)(pair >> (place & 31));
}

__device__ bool any_below(const long long (&limb)[LIMBS], int place) {
    bool any = false;
    for (int i = 0; i < LIMBS; ++i) {
        const int low = place - 32 * i;
        if (low >= 32) any |= limb[i] != 0;
        if (low > 0 && low < 32) any |= (limb[i] & ((1ll << low) - 1)) != 0;
    }
    return any;
}

// To nearest even in one step, from the limbs to the destination.
__device__ uint32_t round_limbs(const long long (&limb)[LIMBS], Format form) {
    if (limb[LIMBS - 1] != 0) return form.infinity;
    int top = LIMBS - 1;
    while (top > 0 && limb[top] == 0) --top;
    const int highest = 32 * top + 31 - __clz((int)limb[top]);
    if (limb[top] == 0) return 0;
    int lowest = highest - form.precision + 1;
    lowest = lowest > form.lowest_bit ? lowest : form.lowest_bit;
    uint32_t bits = bits_from(limb, lowest) & ((1u << form.precision) - 1);
    const bool half = bits_from(limb, lowest - 1) & 1;
    bits += half && ((bits & 1) || any_below(limb, lowest - 1));
    bits += (uint32_t)(lowest - form.lowest_bit) << (form.precision - 1);
    return bits < form.infinity ? bits : form.infinity;
}

__global__ void __launch_bounds__(THREADS) round(ExactState state, int dtype, void* out) {
    const long long column = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (column >= state.columns) return;
    const Format form = format_of(dtype);
    long long limb[LIMBS];
    load_limbs(state, column, limb);
    bool negative = limb[LIMBS - 1] < 0;
    if (negative) {
        for (int i = 0; i < LIMBS; ++i) limb[i] = -limb[i];
        normalise_limbs(limb);
    }
    uint32_t bits = round_limbs(limb, form);
    const long long* counter = state.data + LIMBS * state.columns + column;
    const bool nan = counter[0] > 0;
    const bool positive = counter[state.columns] > 0;
    const bool minus = counter[2 * state.columns] > 0;
    if (positive || minus) {
        bits = form.infinity;
        negative = minus;
    }
    if (negative) bits |= form.sign;
    if (nan || (positive && minus)) bits = form.infinity | 1u << (form.precision - 2);
    if (dtype == kFloat32) {
        static_cast<uint32_t*>(out)[column] = bits;
    } else {
        static_cast<uint16_t*>(out)[column] = (uint16_t)bits;
    }
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
    const int shared = rlk::ColumnSums<1>::doubles(rlk::THREADS, false) * (int)sizeof(double);
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
    rlk::round<<<rlk::blocks(a->columns), rlk::THREADS, 0,
                 static_cast<cudaStream_t>(a->stream)>>>({a->state, a->columns}, a->dtype, a->out);
    return cudaGetLastError();
}
