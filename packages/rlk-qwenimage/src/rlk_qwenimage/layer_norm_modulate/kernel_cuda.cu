// SPDX-License-Identifier: Apache-2.0
// layer_norm_modulate in CUDA: the launchers that the generated header declares.
#include "rlk_layer_norm_modulate.h"

#include "rlk_qwenimage/layer_norm_modulate/launch_cuda.cuh"

int rlk_layer_norm_modulate_forward(const LayerNormModulateForward* a) {
    return rlk::run_forward(*a);
}

int rlk_layer_norm_modulate_backward(const LayerNormModulateBackward* a) {
    return rlk::run_backward(*a, nullptr);
}

long long rlk_layer_norm_modulate_backward_workspace(const LayerNormModulateBackward* a) {
    long long bytes = 0;
    return rlk::run_backward(*a, &bytes) == cudaSuccess ? bytes : -1;
}
