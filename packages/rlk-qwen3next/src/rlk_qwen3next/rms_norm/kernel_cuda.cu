// SPDX-License-Identifier: Apache-2.0
// rms_norm in CUDA: the launchers that the generated header declares.
#include "rlk_rms_norm.h"

#include "rlk_qwen3next/rms_norm/launch_cuda.cuh"

static const auto NOTHING = [](auto&) {};

int rlk_rms_norm_forward(const RmsNormForward* a) {
    return rlk::run_forward<rlk::Plain>(*a, NOTHING);
}

int rlk_rms_norm_backward(const RmsNormBackward* a) {
    return rlk::run_backward<rlk::Plain>(*a, NOTHING, nullptr);
}

long long rlk_rms_norm_backward_workspace(const RmsNormBackward* a) {
    return rlk::backward_workspace<rlk::Plain>(*a, NOTHING);
}
