# SPDX-License-Identifier: Apache-2.0
"""Declaration of rms_norm."""

from pathlib import Path
from types import ModuleType

from rlk import backends
from rlk.operator import FLOATS, Claim, Operator, Reduction, Scalar, Tensor, Workload

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


OPERATOR = Operator(
    name="rms_norm",
    package="rlk_qwen3next",
    bits_version=1,
    formula="y = x * rstd * (weight_offset + weight), rstd = 1 / sqrt(sum(x^2) / N + eps)",
    inputs=(
        Tensor("x", ("...", "N"), FLOATS, gradient="row"),
        Tensor("weight", ("N",), ("=x", "float32"), gradient="parameter"),
    ),
    scalars=(
        Scalar("eps", 1e-6, minimum=0.0, also=(0.1,)),
        Scalar("weight_offset", 0.0, also=(1.0, 0.37)),
        # A variant's constant: other kernels, and other claims.
        Scalar("rounding", "ieee", choices=("ieee", "vllm"), fixed=True),
    ),
    outputs=(Tensor("y", ("...", "N"), ("=x",)),),
    saved=(Tensor("rstd", ("...",), ("float32",)),),
    reductions=(
        Reduction("rstd", "row_sum", "N"),
        Reduction("dx", "row_sum", "N"),
        Reduction("dweight", "exact_sum", "T"),
    ),
    category="reduction",
    claims=(
        Claim("repeatable", ("y", "rstd", "dx", "dweight")),
        Claim("batch_invariant", ("y", "rstd", "dx")),
        Claim("order_free", ("dweight",)),
        Claim("backend_equal", ("y", "rstd", "dx", "dweight")),
        Claim("gpu_to_gpu", ("y", "rstd", "dx", "dweight")),
    ),
    workloads=(
        Workload("hidden size of Qwen3-Next", {"T": 65536, "N": 2048}),
        Workload("attention head of Qwen3-Next", {"T": 131072, "N": 256}),
    ),
    accuracy_from={"N": 8},
    oracle=oracle.forward,
    backends=(
        backends.cuda(_load_cuda),
        backends.triton(_load_triton),
        backends.golden(_load_golden),
    ),
)
