// SPDX-License-Identifier: Apache-2.0
// The reciprocal root of NVIDIA GPUs in place of a root and a division.
// check_ptx: allow rsqrt.approx.f32 (the rounding that sources with this header are for)
#pragma once
#include "rlk_qwen3next/rms_norm/device_cuda.cuh"

namespace rlk {

struct HardwareRoot {
    static __device__ __forceinline__ float of(float v) { return hardware_rsqrt(v); }
};

}  // namespace rlk
