// SPDX-License-Identifier: Apache-2.0
// rms_norm_residual in CUDA: the launchers that the generated header declares.
#include "rlk_rms_norm_residual.h"

#include "rlk_qwen3next/rms_norm/launch_cuda.cuh"
#include "rlk_qwen3next/rms_norm_residual/operands.cuh"

int rlk_rms_norm_residual_forward(const RmsNormResidualForward* a) {
    return rlk::run_forward<rlk::WithResidual>(*a, rlk::residual_of(*a));
}

int rlk_rms_norm_residual_backward(const RmsNormResidualBackward* a) {
    return rlk::run_backward<rlk::WithResidual>(*a, rlk::residual_gradient_of(*a), nullptr);
}

long long rlk_rms_norm_residual_backward_workspace(const RmsNormResidualBackward* a) {
    return rlk::backward_workspace<rlk::WithResidual>(*a, rlk::residual_gradient_of(*a));
}
