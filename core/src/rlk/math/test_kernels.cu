// SPDX-License-Identifier: Apache-2.0
// The functions of device_cuda.cuh over a range of FP32 bit patterns.
#include "rlk_math_test.h"

#include "rlk/math/device_cuda.cuh"

namespace {

// sigmoids() of x among seven others, which decide with x whether the range is tested once.
__device__ float sigmoid_among(float others, float x) {
    float values[8], results[8];
    for (int i = 0; i < 8; ++i) values[i] = i == 5 ? x : others;
    rlk::sigmoids(values, results);
    return results[5];
}

__device__ float reciprocal_where_in_range(float x) {
    return x >= 1.0f && x < 0x1p126f ? rlk::reciprocal_in_range(x) : rlk::reciprocal(x);
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
    }
    return 0.0f;
}

__global__ void range(float* y, long long first, long long count, int function) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < count) y[i] = evaluate(function, __uint_as_float((uint32_t)(first + i)));
}

}  // namespace

int rlk_math_test_range(const MathTestRange* a) {
    rlk::DeviceGuard guard(a->device);
    if (guard.error() != cudaSuccess) return guard.error();
    range<<<(unsigned)((a->count + 255) / 256), 256, 0, static_cast<cudaStream_t>(a->stream)>>>(
        static_cast<float*>(a->y), a->first, a->count, a->function);
    return cudaGetLastError();
}
