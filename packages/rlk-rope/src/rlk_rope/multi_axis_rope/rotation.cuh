// SPDX-License-Identifier: Apache-2.0
// One pair turned, each product rounded: the default of both operators.
// check_ptx: forbid fma except ComplexEager
#pragma once

namespace rlk {

struct Separate {
  // Back if INVERSE: a sum becomes a difference, and nothing is negated.
  template <bool INVERSE>
  static __device__ __forceinline__ void turn(float& first, float& second, float c, float s) {
    const float a = first, b = second;
    const float ac = __fmul_rn(a, c), as = __fmul_rn(a, s);
    const float bc = __fmul_rn(b, c), bs = __fmul_rn(b, s);
    if (INVERSE) {
      first = __fadd_rn(ac, bs);
      second = __fsub_rn(bc, as);
    } else {
      first = __fsub_rn(ac, bs);
      second = __fadd_rn(as, bc);
    }
  }
};

}  // namespace rlk
