# SPDX-License-Identifier: Apache-2.0
"""Declaration of layer_norm_modulate."""

from pathlib import Path
from types import ModuleType

from rlk import backends
from rlk.operator import FLOATS, Claim, Operator, Reduction, Scalar, Tensor, Workload

from . import oracle


def _load_cuda() -> ModuleType:
    from rlk.cuda import launch

    return launch.module(OPERATOR, Path(__file__).with_name("kernel_cuda.cu"))


def _load_triton() -> ModuleType:
    from . import kernel_triton

    return kernel_triton


def _load_golden() -> ModuleType:
    from . import golden

    return golden


_RESULTS = ("out", "mean", "rstd", "dx", "dscale", "dshift")

OPERATOR = Operator(
    name="layer_norm_modulate",
    package="rlk_qwenimage",
    bits_version=1,
    formula="out = (x - mean) * rstd * (1 + scale) + shift, "
    "rstd = 1 / sqrt(sum((x - mean)^2) / N + eps)",
    inputs=(
        Tensor("x", ("...", "S", "N"), FLOATS, gradient="row"),
        Tensor("scale", ("...", "N"), ("=x",), gradient="row"),
        Tensor("shift", ("...", "N"), ("=x",), gradient="row"),
    ),
    scalars=(Scalar("eps", 1e-6, minimum=0.0, also=(0.1,)),),
    outputs=(Tensor("out", ("...", "S", "N"), ("=x",)),),
    saved=(
        Tensor("mean", ("...", "S"), ("float32",)),
        Tensor("rstd", ("...", "S"), ("float32",)),
    ),
    reductions=(
        Reduction("mean", "row_sum", "N"),
        Reduction("rstd", "row_sum", "N"),
        Reduction("dx", "row_sum", "N"),
        Reduction("dscale", "exact_sum", "S"),
        Reduction("dshift", "exact_sum", "S"),
    ),
    category="reduction",
    claims=(
        Claim("repeatable", _RESULTS),
        Claim("batch_invariant", _RESULTS),
        Claim("order_free", ("dscale", "dshift")),
        Claim("backend_equal", _RESULTS),
        Claim("gpu_to_gpu", _RESULTS),
    ),
    workloads=(
        Workload("Qwen-Image, 1024x1024", {"T": 1, "S": 4096, "N": 3072}),
        Workload("Qwen-Image, 1664x928", {"T": 1, "S": 6032, "N": 3072}),
        Workload("Qwen-Image, 1328x1328", {"T": 1, "S": 6889, "N": 3072}),
        Workload("Qwen-Image, guided pair", {"T": 2, "S": 4096, "N": 3072}),
        Workload("Qwen-Image, many short samples", {"T": 2048, "S": 3, "N": 3072}),
    ),
    oracle=oracle.forward,
    backends=(
        backends.cuda(_load_cuda),
        backends.triton(_load_triton),
        backends.golden(_load_golden),
    ),
    # 328: a whole chunk and a part of one, in whole vectors of 16 bytes.
    gate_sizes={"S": 3, "N": 328},
    # The rows of models; one column; tokens beyond any block; rows longer than a block holds, of
    # which the last has over 256 chunks; vectors and none; one token; few and many of them.
    odd_sizes=(
        {"S": 3, "N": 3072},
        {"S": 1, "N": 1},
        {"S": 257, "N": 3},
        {"S": 1, "N": 65537},
        {"S": 3, "N": 5120},
        {"S": 2, "N": 8200},
        {"S": 33, "N": 2048},
        {"S": 257, "N": 256},
        {"S": 33, "N": 1000},
        {"S": 3, "N": 264},
        {"S": 1, "N": 129},
        {"S": 5, "N": 37},
    ),
    accuracy_from={"N": 16},
)
