// SPDX-License-Identifier: Apache-2.0
// rms_norm_gated in CUDA: the launchers that the generated header declares.
#include "rlk_rms_norm_gated.h"

#include "rlk_qwen3next/rms_norm/launch_cuda.cuh"

// What only this norm has: the gate, its activation and its gradient.
template <typename Call> static auto gate_of(const Call& a) {
    return [&a](auto& n) {
        using T = std::remove_pointer_t<decltype(n.y)>;
        n.beside = {static_cast<const T*>(a.gate), a.gate_stride_T, a.gate_stride_N};
        n.silu = a.activation == ACTIVATION_SILU;
    };
}

static auto gate_of(const RmsNormGatedBackward& a) {
    return [&a](auto& n) {
        using T = std::remove_pointer_t<decltype(n.y)>;
        gate_of<RmsNormGatedBackward>(a)(n);
        n.dgate = static_cast<T*>(a.dgate);
    };
}

int rlk_rms_norm_gated_forward(const RmsNormGatedForward* a) {
    return rlk::run_forward<rlk::Gated>(*a, gate_of(*a));
}

int rlk_rms_norm_gated_backward(const RmsNormGatedBackward* a) {
    return rlk::run_backward<rlk::Gated>(*a, gate_of(*a), nullptr);
}

long long rlk_rms_norm_gated_backward_workspace(const RmsNormGatedBackward* a) {
    return rlk::backward_workspace<rlk::Gated>(*a, gate_of(*a));
}
