// SPDX-License-Identifier: Apache-2.0
// Kernels whose blocks come up while the last ones of the kernel before them work.
#pragma once
#include <cuda_runtime.h>

#include <atomic>

namespace rlk {

// What the second pass waits for: all of the first, whose blocks say with `let_second_pass_start`
// that its own may come up. Code for older devices has neither, and `may_start_early` tells.
__device__ __forceinline__ void wait_for_first_pass() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Before the wait, so that the compiler does not work out an address after it. Reads nothing.
__device__ __forceinline__ void prefetch(const void* address) {
#ifdef __CUDA_ARCH__
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}
__device__ __forceinline__ void let_second_pass_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Whether blocks of KERNEL may come up early: they must be of code that waits, which what the
// driver makes of the PTX of an older generation is not.
template <auto KERNEL> bool may_start_early(int device) {
    constexpr int DEVICES = 16;
    static std::atomic<int> known[DEVICES];
    std::atomic<int>* place = device < DEVICES ? &known[device] : nullptr;
    if (place != nullptr && *place != 0) return *place > 0;
    int driver = 0;
    cudaFuncAttributes attributes{};
    // 12030: the first CUDA whose graphs take such launches too.
    const bool may = cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12030 &&
                     cudaFuncGetAttributes(&attributes, KERNEL) == cudaSuccess &&
                     attributes.ptxVersion >= 90;
    // No error of the kernel that is launched in the ordinary way instead.
    if (!may) cudaGetLastError();
    if (place != nullptr) *place = may ? 1 : -1;
    return may;
}

// Launch KERNEL, early where `early` and the device allow it.
template <auto KERNEL, typename... Arguments>
cudaError_t launch_kernel(bool early, dim3 grid, int threads, int shared_bytes, int device,
                          cudaStream_t stream, Arguments... arguments) {
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = early && may_start_early<KERNEL>(device);
    return cudaLaunchKernelEx(&config, KERNEL, arguments...);
}

}  // namespace rlk
