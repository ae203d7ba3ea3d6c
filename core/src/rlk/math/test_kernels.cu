// SPDX-License-Identifier: Apache-2.0
// The functions of device_cuda.cuh over a range of FP32 bit patterns, and the tables of
// table_cuda.cuh over all BF16 patterns.
#include "rlk_math_test.h"

#include <type_traits>

#include "rlk/math/table_cuda.cuh"

namespace {

// sigmoids() of x among seven others, which decide with x whether the range is tested once.
__device__ float sigmoid_among(float others, float x) {
    float values[8], results[8];
    for (int i = 0; i < 8; ++i) values[i] = i == 5 ? x : others;
    rlk::sigmoids(values, results);
    return results[5];
}

__device__ float reciprocal_where_in_range(float x) {
    return x > 0x1p-100f && x < 0x1p126f ? rlk::reciprocal_in_range(x) : rlk::reciprocal(x);
}

// The order of FUNCTIONS in test_device_cuda.py.
__device__ float evaluate(int function, float x) {
    switch (function) {
        case 0: return rlk::exp(x);
        case 1: return rlk::sigmoid(x);
        case 2: return rlk::silu(x, rlk::sigmoid(x));
        case 3: return rlk::sigmoid_derivative(rlk::sigmoid(x));
        case 4: return rlk::silu_derivative(x, rlk::sigmoid(x));
        case 5: return rlk::reciprocal(rlk::add(1.0f, rlk::exp(rlk::negate(x))));
        case 6: return rlk::divide(1.0f, rlk::add(1.0f, rlk::exp(rlk::negate(x))));
        case 7: return sigmoid_among(0.5f, x);
        case 8: return sigmoid_among(100.0f, x);
        case 9: return reciprocal_where_in_range(x);
        case 10: return rlk::divide(x, rlk::Divisor(2048));
        case 11: return rlk::reciprocal_root(x);
    }
    return 0.0f;
}

__global__ void range(float* y, long long first, long long count, int function) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < count) y[i] = evaluate(function, __uint_as_float((uint32_t)(first + i)));
}

// 65 536: BF16 patterns; 1024: threads of a block, as where a block fills a table.
constexpr int PATTERNS = 65536, TABLE_THREADS = 1024;

// Of what a table gives for a BF16 pattern at one place of eight, among others.
template <typename Table>
__device__ float looked_up(Table table, const MathTestTable& a, int place, uint32_t pattern) {
    rlk::Packed<__nv_bfloat16> packed;
    for (int i = 0; i < rlk::ELEMENTS; ++i) {
        const uint32_t bits = i == place ? pattern : (uint32_t)a.others;
        packed.value[i] = __ushort_as_bfloat16((unsigned short)bits);
    }
    float act[rlk::ELEMENTS], derivative[rlk::ELEMENTS];
    if constexpr (std::is_same_v<Table, rlk::DerivativeTable>) {
        table.find(packed, a.silu != 0, act, derivative);
    } else {
        table.find(packed, a.silu != 0, act);
    }
    float value = 0.0f;
    for (int i = 0; i < rlk::ELEMENTS; ++i) {
        if (i == place) value = a.derivative != 0 ? derivative[i] : act[i];
    }
    return value;
}

// y [8 places, 65536]
__global__ void __launch_bounds__(TABLE_THREADS) tables(MathTestTable a) {
    extern __shared__ float2 entries[];
    const auto fill_y = [&](auto table) {
        __syncthreads();
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < PATTERNS;
             i += gridDim.x * blockDim.x) {
            for (int place = 0; place < rlk::ELEMENTS; ++place) {
                static_cast<float*>(a.y)[place * PATTERNS + i] = looked_up(table, a, place, i);
            }
        }
    };
    if (a.with_derivatives != 0) {
        fill_y(rlk::DerivativeTable::fill(entries, a.silu != 0));
    } else {
        fill_y(rlk::ActivationTable::fill(entries, a.silu != 0));
    }
}

}  // namespace

int rlk_math_test_table(const MathTestTable* a) {
    rlk::DeviceGuard guard(a->device);
    if (guard.error() != cudaSuccess) return guard.error();
    const int bytes = rlk::DerivativeTable::BYTES;
    const cudaError_t error =
        cudaFuncSetAttribute(tables, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    // 16: blocks, each of which fills a table of its own.
    tables<<<16, TABLE_THREADS, bytes, static_cast<cudaStream_t>(a->stream)>>>(*a);
    return cudaGetLastError();
}

int rlk_math_test_range(const MathTestRange* a) {
    rlk::DeviceGuard guard(a->device);
    if (guard.error() != cudaSuccess) return guard.error();
    range<<<(unsigned)((a->count + 255) / 256), 256, 0, static_cast<cudaStream_t>(a->stream)>>>(
        static_cast<float*>(a->y), a->first, a->count, a->function);
    return cudaGetLastError();
}
