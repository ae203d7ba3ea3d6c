// SPDX-License-Identifier: Apache-2.0
// rms_norm_gated in CUDA: the launchers that the generated header declares.
#include "rlk_rms_norm_gated.h"
#include "rlk_qwen3next/rms_norm/launch_cuda.cuh"

namespace {

template <typename T> rlk::NormArguments<T> arguments(const RmsNormGatedForward& a) {
    rlk::NormArguments<T> n{};
    n.x = {static_cast<const T*>(a.x), a.x_stride_T, a.x_stride_N};
    n.gate = {static_cast<const T*>(a.gate), a.gate_stride_T, a.gate_stride_N};
    n.silu = a.activation == ACTIVATION_SILU;
    n.weight = a.weight;
    n.weight_stride = a.weight_stride_N;
    n.weight_dtype = a.weight_dtype;
    n.y = static_cast<T*>(a.y);
    n.rstd_out = static_cast<float*>(a.rstd);
    n.rows = a.T;
    n.columns = (int)a.N;
    n.eps = a.eps;
    n.weight_offset = a.weight_offset;
    return n;
}

template <typename T> rlk::NormArguments<T> arguments(const RmsNormGatedBackward& a) {
    rlk::NormArguments<T> n{};
    n.dy = {static_cast<const T*>(a.dy), a.dy_stride_T, a.dy_stride_N};
    n.x = {static_cast<const T*>(a.x), a.x_stride_T, a.x_stride_N};
    n.gate = {static_cast<const T*>(a.gate), a.gate_stride_T, a.gate_stride_N};
    n.silu = a.activation == ACTIVATION_SILU;
    n.weight = a.weight;
    n.weight_stride = a.weight_stride_N;
    n.weight_dtype = a.weight_dtype;
    n.rstd = static_cast<const float*>(a.rstd);
    n.rstd_stride = a.rstd_stride_T;
    n.dx = static_cast<T*>(a.dx);
    n.dgate = static_cast<T*>(a.dgate);
    n.state = a.dweight_state;
    n.partial = static_cast<double*>(a.workspace);
    n.rows = a.T;
    n.columns = (int)a.N;
    n.weight_offset = a.weight_offset;
    return n;
}

cudaError_t backward(const RmsNormGatedBackward* a, long long* workspace) {
    rlk::DeviceGuard guard(a->device);
    if (guard.error() != cudaSuccess) return guard.error();
    const cudaStream_t stream = static_cast<cudaStream_t>(a->stream);
    return rlk::by_dtype(a->x_dtype, [&](auto zero) {
        return rlk::norm_backward<decltype(zero), true>(arguments<decltype(zero)>(*a), a->device,
                                                         stream, workspace);
    });
}

}  // namespace

int rlk_rms_norm_gated_forward(const RmsNormGatedForward* a) {
    rlk::DeviceGuard guard(a->device);
    if (guard.error() != cudaSuccess) return guard.error();
    const cudaStream_t stream = static_cast<cudaStream_t>(a->stream);
    return rlk::by_dtype(a->x_dtype, [&](auto zero) {
        return rlk::norm_forward<decltype(zero), true>(arguments<decltype(zero)>(*a), a->device,
                                                        stream);
    });
}

int rlk_rms_norm_gated_backward(const RmsNormGatedBackward* a) { return backward(a, nullptr); }

long long rlk_rms_norm_gated_backward_workspace(const RmsNormGatedBackward* a) {
    long long bytes = 0;
    return backward(a, &bytes) == cudaSuccess ? bytes : -1;
}
