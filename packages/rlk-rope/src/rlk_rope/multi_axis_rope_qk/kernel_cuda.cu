// SPDX-License-Identifier: Apache-2.0
// multi_axis_rope_qk in CUDA: the launchers that the generated header declares.
#include "rlk_multi_axis_rope_qk.h"

#include "rlk_rope/multi_axis_rope/launch_cuda.cuh"

int rlk_multi_axis_rope_qk_forward(const MultiAxisRopeQkForward* a) {
  return rlk::run_rope<2>(*a, a->q_dtype, false, [a](auto& n) {
    n.part[0] = rlk::heads_of(n, a->q, a->q_stride_B, a->q_stride_S, a->q_stride_H, a->q_stride_D,
                              a->q_out, a->H);
    n.part[1] = rlk::heads_of(n, a->k, a->k_stride_B, a->k_stride_S, a->k_stride_G, a->k_stride_D,
                              a->k_out, a->G);
  });
}

int rlk_multi_axis_rope_qk_backward(const MultiAxisRopeQkBackward* a) {
  return rlk::run_rope<2>(*a, a->q_dtype, true, [a](auto& n) {
    n.part[0] = rlk::heads_of(n, a->dq_out, a->dq_out_stride_B, a->dq_out_stride_S,
                              a->dq_out_stride_H, a->dq_out_stride_D, a->dq, a->H);
    n.part[1] = rlk::heads_of(n, a->dk_out, a->dk_out_stride_B, a->dk_out_stride_S,
                              a->dk_out_stride_G, a->dk_out_stride_D, a->dk, a->G);
  });
}

long long rlk_multi_axis_rope_qk_backward_workspace(const MultiAxisRopeQkBackward* a) { return 0; }
