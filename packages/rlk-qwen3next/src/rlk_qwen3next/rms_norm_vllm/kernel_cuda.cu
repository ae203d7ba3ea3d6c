// SPDX-License-Identifier: Apache-2.0
// rms_norm_vllm in CUDA: the launchers that the generated header declares.
#include "rlk_rms_norm_vllm.h"

#include "rlk_qwen3next/rms_norm/launch_cuda.cuh"
#include "rlk_qwen3next/rms_norm_vllm/hardware_root.cuh"

using Kind = rlk::Norm<false, false, rlk::HardwareRoot>;
static const auto NOTHING = [](auto&) {};

int rlk_rms_norm_vllm_forward(const RmsNormVllmForward* a) {
    return rlk::run_forward<Kind>(*a, NOTHING);
}

int rlk_rms_norm_vllm_backward(const RmsNormVllmBackward* a) {
    return rlk::run_backward<Kind>(*a, NOTHING, nullptr);
}

long long rlk_rms_norm_vllm_backward_workspace(const RmsNormVllmBackward* a) {
    return rlk::backward_workspace<Kind>(*a, NOTHING);
}
