// SPDX-License-Identifier: Apache-2.0
// rms_norm_residual_vllm in CUDA: the launchers that the generated header declares.
#include "rlk_rms_norm_residual_vllm.h"

#include "rlk_qwen3next/rms_norm/launch_cuda.cuh"
#include "rlk_qwen3next/rms_norm_residual/operands.cuh"
#include "rlk_qwen3next/rms_norm_vllm/hardware_root.cuh"

using Kind = rlk::Norm<false, true, rlk::HardwareRoot>;

int rlk_rms_norm_residual_vllm_forward(const RmsNormResidualVllmForward* a) {
    return rlk::run_forward<Kind>(*a, rlk::residual_of(*a));
}

int rlk_rms_norm_residual_vllm_backward(const RmsNormResidualVllmBackward* a) {
    return rlk::run_backward<Kind>(*a, rlk::residual_gradient_of(*a), nullptr);
}

long long rlk_rms_norm_residual_vllm_backward_workspace(const RmsNormResidualVllmBackward* a) {
    return rlk::backward_workspace<Kind>(*a, rlk::residual_gradient_of(*a));
}
