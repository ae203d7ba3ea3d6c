# SPDX-License-Identifier: Apache-2.0
"""Declaration of rms_norm_residual: rms_norm of a sum, which is returned too."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

from rlk import backends
from rlk.operator import FLOATS, Claim, Reduction, Tensor, Workload

from ..rms_norm.operator import OPERATOR as RMS_NORM
from . import oracle


def _load_cuda() -> ModuleType:
    from rlk.cuda import launch

    source = Path(__file__).with_name("kernel_cuda.cu")
    return launch.module(OPERATOR, source, finishes_sums=True)


def _load_triton() -> ModuleType:
    from . import kernel_triton

    return kernel_triton


def _load_golden() -> ModuleType:
    from . import golden

    return golden


_ROWS = ("y", "residual_out", "rstd", "dx", "dresidual")

OPERATOR = replace(
    RMS_NORM,
    name="rms_norm_residual",
    formula=(
        "residual_out = x + residual, y = residual_out * rstd * (weight_offset + weight), "
        "rstd = 1 / sqrt(sum(residual_out^2) / N + eps)"
    ),
    inputs=(
        Tensor("x", ("...", "N"), FLOATS, gradient="row"),
        Tensor("residual", ("...", "N"), ("=x",), gradient="row"),
        Tensor("weight", ("N",), ("=x", "float32"), gradient="parameter"),
    ),
    outputs=(
        Tensor("y", ("...", "N"), ("=x",)),
        Tensor("residual_out", ("...", "N"), ("=x",), sum_of=("x", "residual")),
    ),
    reductions=(
        Reduction("rstd", "row_sum", "N"),
        Reduction("dx", "row_sum", "N"),
        Reduction("dresidual", "row_sum", "N"),
        Reduction("dweight", "exact_sum", "T"),
    ),
    claims=(
        Claim("repeatable", (*_ROWS, "dweight")),
        Claim("batch_invariant", _ROWS),
        Claim("order_free", ("dweight",)),
        Claim("backend_equal", (*_ROWS, "dweight")),
        Claim("gpu_to_gpu", (*_ROWS, "dweight")),
    ),
    workloads=(
        Workload("hidden size of Qwen3-Next", {"T": 65536, "N": 2048}),
        Workload("linear attention head of Qwen3-Next", {"T": 262144, "N": 128}),
    ),
    oracle=oracle.forward,
    casts=("residual_out",),
    backends=(
        backends.cuda(_load_cuda),
        backends.triton(_load_triton),
        backends.golden(_load_golden),
    ),
)
