// SPDX-License-Identifier: Apache-2.0
// adaln_mod_projection in CUDA: SiLU and its derivative around products of the MMA chain. Bits as
// in golden.py.
#include "rlk_adaln_mod_projection.h"

#include "rlk/cuda/rows.cuh"
#include "rlk/math/device_cuda.cuh"

namespace rlk {
namespace {

// 256: elements of a block, one for each thread, so that a warp reads neighbours.
constexpr int THREADS = 256;

// Which element of rows [rows, columns] a thread has: blocks go along a row first.
struct Place {
    long long row, column;

    __device__ __forceinline__ explicit Place(long long columns) {
        const long long blocks = (columns + THREADS - 1) / THREADS;
        row = blockIdx.x / blocks;
        column = (blockIdx.x % blocks) * THREADS + threadIdx.x;
    }
};

template <typename T>
__global__ void __launch_bounds__(THREADS) activation(Rows<T> temb, long long columns, T* act) {
    const Place at(columns);
    if (at.column >= columns) return;
    const float z = to_float(temb.data[at.row * temb.row_stride + at.column * temb.column_stride]);
    act[at.row * columns + at.column] = from_float<T>(silu(z, sigmoid(z)));
}

template <typename T>
__global__ void __launch_bounds__(THREADS) activation_gradient(const float* dact, Rows<T> temb,
                                                               long long columns, T* dtemb) {
    const Place at(columns);
    if (at.column >= columns) return;
    const float z = to_float(temb.data[at.row * temb.row_stride + at.column * temb.column_stride]);
    const long long place = at.row * columns + at.column;
    dtemb[place] = from_float<T>(multiply(dact[place], silu_derivative(z, sigmoid(z))));
}

// The blocks of a call, or 0 where a grid cannot hold them.
unsigned blocks(const AdalnActivation* a) {
    const long long needed = a->rows * ((a->columns + THREADS - 1) / THREADS);
    return needed < (1ll << 31) ? (unsigned)needed : 0u;
}

template <typename T> Rows<T> rows_of(const AdalnActivation* a) {
    return {static_cast<const T*>(a->temb), a->row_stride, a->column_stride};
}

}  // namespace
}  // namespace rlk

// out = silu(temb)
int rlk_adaln_mod_projection_activation(const AdalnActivation* a) {
    rlk::DeviceGuard guard(a->device);
    if (guard.error() != cudaSuccess) return guard.error();
    if (rlk::blocks(a) == 0) return cudaErrorInvalidValue;
    return rlk::by_dtype(a->dtype, [&](auto zero) {
        using T = decltype(zero);
        rlk::activation<T><<<rlk::blocks(a), rlk::THREADS, 0, static_cast<cudaStream_t>(a->stream)>>>(
            rlk::rows_of<T>(a), a->columns, static_cast<T*>(a->out));
        return cudaGetLastError();
    });
}

// out = dact * silu'(temb)
int rlk_adaln_mod_projection_activation_gradient(const AdalnActivation* a) {
    rlk::DeviceGuard guard(a->device);
    if (guard.error() != cudaSuccess) return guard.error();
    if (rlk::blocks(a) == 0) return cudaErrorInvalidValue;
    return rlk::by_dtype(a->dtype, [&](auto zero) {
        using T = decltype(zero);
        rlk::activation_gradient<T>
            <<<rlk::blocks(a), rlk::THREADS, 0, static_cast<cudaStream_t>(a->stream)>>>(
                static_cast<const float*>(a->dact), rlk::rows_of<T>(a), a->columns,
                static_cast<T*>(a->out));
        return cudaGetLastError();
    });
}
