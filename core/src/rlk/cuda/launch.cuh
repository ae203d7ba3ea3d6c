// SPDX-License-Identifier: Apache-2.0
// What every operator's binary holds beside its kernels. The generated header includes it, once.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#define RLK_EXPORT extern "C" __attribute__((visibility("default")))

namespace rlk {

// Codes of the <tensor>_dtype fields.
enum Dtype : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// For the scope of a launcher: makes a device current, and lets the launch load its kernel even
// while some stream of the process is being captured. Restores both.
//
//     rlk::DeviceGuard guard(a->device);
//     if (guard.error() != cudaSuccess) return guard.error();
//     kernel<<<grid, block, 0, static_cast<cudaStream_t>(a->stream)>>>(...);
//     return cudaGetLastError();
class DeviceGuard {
   public:
    explicit DeviceGuard(int device) {
        error_ = driver().error;
        // The context, not the device: a thread without one must not get one on device 0.
        if (error_ == cudaSuccess && driver().get_current(&before_) != CUDA_SUCCESS) {
            error_ = cudaErrorInitializationError;
        }
        restores_ = error_ == cudaSuccess;
        if (restores_) error_ = cudaSetDevice(device);
        if (error_ == cudaSuccess) error_ = cudaThreadExchangeStreamCaptureMode(&mode_);
        restores_mode_ = error_ == cudaSuccess;
    }
    ~DeviceGuard() {
        if (restores_mode_) cudaThreadExchangeStreamCaptureMode(&mode_);
        if (restores_) driver().set_current(before_);
    }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

    cudaError_t error() const { return error_; }

   private:
    struct Driver {
        CUresult (*get_current)(CUcontext*) = nullptr;
        CUresult (*set_current)(CUcontext) = nullptr;
        cudaError_t error = cudaSuccess;

        Driver() {
            find("cuCtxGetCurrent", reinterpret_cast<void**>(&get_current));
            find("cuCtxSetCurrent", reinterpret_cast<void**>(&set_current));
        }
        void find(const char* name, void** function) {
            if (error != cudaSuccess) return;
            cudaDriverEntryPointQueryResult found;
            // 4000: the CUDA version that brought both functions.
            error = cudaGetDriverEntryPointByVersion(name, function, 4000, cudaEnableDefault, &found);
            if (error == cudaSuccess && found != cudaDriverEntryPointSuccess) {
                error = cudaErrorSymbolNotFound;
            }
        }
    };
    static const Driver& driver() {
        static const Driver found;
        return found;
    }

    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
    CUcontext before_ = nullptr;
    cudaError_t error_ = cudaSuccess;
    bool restores_ = false;
    bool restores_mode_ = false;
};

// One operation of the strict-math probe. `operation` indexes probe.py's OPERATIONS.
struct ProbeCase {
    int operation;
    float a, b, c;
};

// 96: cases of one probe, 1.5 KB of the 4 KB that kernel arguments may take.
constexpr int kProbeCases = 96;

struct ProbeCases {
    ProbeCase at[kProbeCases];
};

static __device__ float probe_results[kProbeCases];

// Plain operators beside intrinsics: the compiler's settings act on the plain ones.
static __global__ void probe_kernel(ProbeCases cases) {
    const ProbeCase v = cases.at[threadIdx.x];
    float result = 0.0f;
    switch (v.operation) {
        case 0: result = v.a + v.b; break;
        case 1: result = v.a * v.b; break;
        case 2: result = v.a * v.b + v.c; break;
        case 3: result = v.a / v.b; break;
        case 4: result = sqrtf(v.a); break;
        case 5: result = __fadd_rn(v.a, v.b); break;
        case 6: result = __fmul_rn(v.a, v.b); break;
        case 7: result = __fmaf_rn(v.a, v.b, v.c); break;
        case 8: result = __fdiv_rn(v.a, v.b); break;
        case 9: result = __fsqrt_rn(v.a); break;
    }
    probe_results[threadIdx.x] = result;
}

// On a stream of its own and without allocating, so that a capture elsewhere goes on.
inline cudaError_t probe(int device, const ProbeCases& cases, float* results) {
    DeviceGuard guard(device);
    if (guard.error() != cudaSuccess) return guard.error();
    cudaStream_t stream;
    cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (error != cudaSuccess) return error;
    probe_kernel<<<1, kProbeCases, 0, stream>>>(cases);
    error = cudaGetLastError();
    if (error == cudaSuccess) {
        error = cudaMemcpyFromSymbolAsync(results, probe_results, sizeof(probe_results), 0,
                                          cudaMemcpyDeviceToHost, stream);
    }
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
    return error;
}

}  // namespace rlk

RLK_EXPORT int rlk_abi_version() { return RLK_ABI; }

RLK_EXPORT const char* rlk_error_string(int error) {
    return cudaGetErrorString(static_cast<cudaError_t>(error));
}

RLK_EXPORT int rlk_driver_version() {
    int version = 0;
    cudaDriverGetVersion(&version);
    return version;
}

RLK_EXPORT int rlk_probe(int device, const rlk::ProbeCases* cases, float* results) {
    return rlk::probe(device, *cases, results);
}
