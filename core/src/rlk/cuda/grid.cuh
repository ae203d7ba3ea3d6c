// SPDX-License-Identifier: Apache-2.0
// How many blocks of a kernel a device holds: grids that fill it once.
#pragma once
#include <cuda_runtime.h>

#include <atomic>

namespace rlk {

// Let a kernel have all the shared memory that a block may take, whatever a call needs of it: calls of
// other threads, and other block sizes, must not find the limit of this one.
template <auto KERNEL> cudaError_t allow_shared_memory(int device) {
    int limit = 0;
    cudaFuncAttributes attributes{};
    cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaFuncGetAttributes(&attributes, KERNEL);
    return cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                limit - (int)attributes.sharedSizeBytes);
}

// Blocks of a kernel that a device holds at once; 0 if it cannot run there. Asked once for each
// device and block size, of which a kernel has one amount of shared memory: the questions take
// longer than a launch.
template <auto KERNEL> int resident_blocks(int threads, int shared_bytes, int device) {
    constexpr int DEVICES = 16;
    static std::atomic<int> known[DEVICES][33];
    std::atomic<int>* place = device < DEVICES ? &known[device][threads / 32] : nullptr;
    if (place != nullptr && *place != 0) return *place > 0 ? (int)*place : 0;
    int processors = 0, blocks = 0;
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    allow_shared_memory<KERNEL>(device);
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
