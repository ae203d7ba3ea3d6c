// SPDX-License-Identifier: Apache-2.0
// One pair turned as PyTorch's product of complex64 tensors turns it on a GPU: the second product
// is rounded, the first is fused with it.
#pragma once

namespace rlk {

struct ComplexEager {
  // By the conjugate if INVERSE. The sign bit is flipped, which no rounding sees.
  template <bool INVERSE>
  static __device__ __forceinline__ void turn(float& first, float& second, float c, float s) {
    const float a = first, b = second;
    const float bc = __fmul_rn(b, c), bs = __fmul_rn(b, s);
    first = __fmaf_rn(a, c, INVERSE ? bs : -bs);
    second = __fmaf_rn(a, INVERSE ? -s : s, bc);
  }
};

}  // namespace rlk
