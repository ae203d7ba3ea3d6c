# SPDX-License-Identifier: Apache-2.0
"""Declaration of qwen3_next_rms_norm: rms_norm with the offset fixed at 1."""

from dataclasses import replace

from rlk.operator import Scalar, Workload

from ..rms_norm.operator import OPERATOR as RMS_NORM
from . import oracle

OPERATOR = replace(
    RMS_NORM,
    name="qwen3_next_rms_norm",
    formula="y = x * rstd * (1 + weight), rstd = 1 / sqrt(sum(x^2) / N + eps)",
    scalars=tuple(
        Scalar("weight_offset", 1.0, fixed=True) if s.name == "weight_offset" else s
        for s in RMS_NORM.scalars
    ),
    workloads=(
        Workload("decoder and final norms of Qwen3-Next", {"T": 65536, "N": 2048}),
        Workload("query and key norms of Qwen3-Next", {"T": 131072, "N": 256}),
    ),
    oracle=oracle.forward,
)
