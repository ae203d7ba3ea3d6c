// SPDX-License-Identifier: Apache-2.0
// How many blocks of a kernel a device holds: grids that fill it once.
#pragma once
#include <cuda_runtime.h>

#include <atomic>

namespace rlk {

// Blocks of a kernel that a device holds at once; 0 if it cannot run there. Asked once for each
// device and block size, of which a kernel has one amount of shared memory: the questions take
// longer than a launch.
template <auto KERNEL> int resident_blocks(int threads, int shared_bytes, int device) {
    constexpr int DEVICES = 16;
    static std::atomic<int> known[DEVICES][33];
    std::atomic<int>* place = device < DEVICES ? &known[device][threads / 32] : nullptr;
    if (place != nullptr && *place != 0) return *place > 0 ? (int)*place : 0;
    int processors = 0, blocks = 0, shared_limit = 0;
    cudaFuncAttributes attributes{};
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaFuncGetAttributes(&attributes, KERNEL);
    // All that a block may take: one block size must not lower the limit of another.
    cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         shared_limit - (int)attributes.sharedSizeBytes);
    if (cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, KERNEL, threads, shared_bytes)) {
        // More shared memory than there is: no error of the kernel that is launched instead.
        cudaGetLastError();
        blocks = 0;
    }
    const int resident = processors * blocks;
    if (place != nullptr) *place = resident > 0 ? resident : -1;
    return resident;
}

// A grid that fills the device once: `work` blocks at most, as more would find nothing to do; 0 if
// the device has not the shared memory for one.
template <auto KERNEL>
int grid_size(int threads, int shared_bytes, int device, long long work) {
    const int resident = resident_blocks<KERNEL>(threads, shared_bytes, device);
    return (int)(work < resident ? work : resident);
}

inline long long ceil_divide(long long a, long long b) { return (a + b - 1) / b; }

}  // namespace rlk
