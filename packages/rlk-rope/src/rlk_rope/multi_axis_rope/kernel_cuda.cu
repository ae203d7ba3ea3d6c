// SPDX-License-Identifier: Apache-2.0
// multi_axis_rope in CUDA: the launchers that the generated header declares.
#include "rlk_multi_axis_rope.h"

#include "rlk_rope/multi_axis_rope/launch_cuda.cuh"

int rlk_multi_axis_rope_forward(const MultiAxisRopeForward* a) {
  return rlk::run_rope<1>(*a, a->x_dtype, false, [a](auto& n) {
    n.part[0] = rlk::heads_of(n, a->x, a->x_stride_B, a->x_stride_S, a->x_stride_H, a->x_stride_D,
                              a->y, a->H);
  });
}

int rlk_multi_axis_rope_backward(const MultiAxisRopeBackward* a) {
  return rlk::run_rope<1>(*a, a->x_dtype, true, [a](auto& n) {
    n.part[0] = rlk::heads_of(n, a->dy, a->dy_stride_B, a->dy_stride_S, a->dy_stride_H,
                              a->dy_stride_D, a->dx, a->H);
  });
}

long long rlk_multi_axis_rope_backward_workspace(const MultiAxisRopeBackward* a) { return 0; }
