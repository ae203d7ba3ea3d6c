# SPDX-License-Identifier: Apache-2.0
"""Declaration of rms_norm_residual_vllm: rms_norm_residual with the reciprocal root of GPUs."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

from rlk import backends

from ..rms_norm_residual.operator import OPERATOR as RMS_NORM_RESIDUAL
from ..rms_norm_vllm.operator import ELSEWHERE, claims_of, with_hardware_root
from . import oracle


def _load_cuda() -> ModuleType:
    from rlk.cuda import launch

    source = Path(__file__).with_name("kernel_cuda.cu")
    return launch.module(OPERATOR, source, finishes_sums=True)


def _load_triton() -> ModuleType:
    from . import kernel_triton

    return kernel_triton


OPERATOR = replace(
    RMS_NORM_RESIDUAL,
    name="rms_norm_residual_vllm",
    formula=(
        "residual_out = x + residual, y = residual_out * rstd * (weight_offset + weight), "
        "rstd = rsqrt(sum(residual_out^2) / N + eps)"
    ),
    scalars=with_hardware_root(RMS_NORM_RESIDUAL.scalars),
    claims=claims_of(RMS_NORM_RESIDUAL, ("y", "residual_out")),
    oracle=oracle.forward,
    backends=(backends.cuda(_load_cuda), backends.triton(_load_triton, interpreted=False)),
    elsewhere=ELSEWHERE,
)
