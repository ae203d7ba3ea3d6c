// SPDX-License-Identifier: Apache-2.0
// What only norms of a sum have, from the structs of their calls.
#pragma once
#include "rlk_qwen3next/rms_norm/device_cuda.cuh"

namespace rlk {

template <typename Call> auto residual_of(const Call& a) {
    return [&a](auto& n) {
        using T = std::remove_pointer_t<decltype(n.y)>;
        n.beside = {static_cast<const T*>(a.residual), a.residual_stride_T, a.residual_stride_N};
        n.residual_out = static_cast<T*>(a.residual_out);
    };
}

template <typename Call> auto residual_gradient_of(const Call& a) {
    return [&a](auto& n) {
        using T = std::remove_pointer_t<decltype(n.y)>;
        n.beside = {static_cast<const T*>(a.dresidual_out), a.dresidual_out_stride_T,
                    a.dresidual_out_stride_N};
    };
}

}  // namespace rlk
