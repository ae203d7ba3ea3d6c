// SPDX-License-Identifier: Apache-2.0
// Row sums and dot products by the device functions, looped over chunks as operators do.
#include "rlk_row_sum_test.h"

#include "rlk/reduce/row_sum/device_cuda.cuh"

namespace {

// LANES neighbouring lanes hold a row; fewer than 32 serve rows of one chunk or less. Without b the
// sum of a.
template <int LANES>
__global__ void dot(const float* a, const float* b, float* y, long long rows, int columns) {
    const int lane = threadIdx.x % LANES;
    const long long row = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / LANES;
    float total = 0.0f;
    for (int start = 0; start < columns; start += rlk::CHUNK) {
        float left[rlk::LANE_TERMS], right[rlk::LANE_TERMS];
        for (int i = 0; i < rlk::LANE_TERMS; ++i) {
            const int column = start + lane * rlk::LANE_TERMS + i;
            const bool inside = row < rows && column < columns;
            left[i] = inside ? a[row * columns + column] : 0.0f;
            right[i] = inside && b != nullptr ? b[row * columns + column] : 0.0f;
        }
        const float lane_total = b != nullptr ? rlk::lane_dot(left, right) : rlk::lane_sum(left);
        total = rlk::add(total, rlk::chunk_tree<LANES>(lane_total));
    }
    if (lane == 0 && row < rows) y[row] = total;
}

template <int LANES> cudaError_t launch(const RowSumTestDot* a) {
    const unsigned blocks = (unsigned)((a->rows * LANES + 127) / 128);
    dot<LANES><<<blocks, 128, 0, static_cast<cudaStream_t>(a->stream)>>>(
        static_cast<const float*>(a->a), static_cast<const float*>(a->b),
        static_cast<float*>(a->y), a->rows, (int)a->columns);
    return cudaGetLastError();
}

}  // namespace

int rlk_row_sum_test_dot(const RowSumTestDot* a) {
    rlk::DeviceGuard guard(a->device);
    if (guard.error() != cudaSuccess) return guard.error();
    switch (a->lanes) {
        case 8: return launch<8>(a);
        case 16: return launch<16>(a);
        case 32: return launch<32>(a);
    }
    return cudaErrorInvalidValue;
}
