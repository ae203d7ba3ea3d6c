# SPDX-License-Identifier: Apache-2.0
"""Declaration of demo: everything else about it is derived from this."""

from types import ModuleType

from rlk import backends
from rlk.operator import FLOATS, Claim, Operator, Reduction, Tensor, Workload

from . import oracle


def _load_triton() -> ModuleType:
    from . import kernel_triton

    return kernel_triton


def _load_golden() -> ModuleType:
    from . import golden

    return golden


OPERATOR = Operator(
    name="demo",
    package="rlk_demo",
    bits_version=1,
    formula="y = x * damping * weight, damping = 1 / (1 + sum(x^2) / N)",
    inputs=(
        Tensor("x", ("...", "N"), FLOATS, gradient="row"),
        Tensor("weight", ("N",), ("=x", "float32"), gradient="parameter"),
    ),
    scalars=(),
    outputs=(Tensor("y", ("...", "N"), ("=x",)),),
    saved=(Tensor("damping", ("...",), ("float32",)),),
    reductions=(
        Reduction("damping", "row_sum", "N"),
        Reduction("dx", "row_sum", "N"),
        Reduction("dweight", "exact_sum", "T"),
    ),
    category="reduction",
    claims=(
        Claim("repeatable", ("y", "damping", "dx", "dweight")),
        Claim("batch_invariant", ("y", "damping", "dx")),
        Claim("order_free", ("dweight",)),
        Claim("backend_equal", ("y", "damping", "dx", "dweight")),
        Claim("gpu_to_gpu", ("y", "damping", "dx", "dweight")),
    ),
    workloads=(Workload("no model: a size to start from", {"T": 8192, "N": 128}),),
    oracle=oracle.forward,
    backends=(backends.triton(_load_triton), backends.golden(_load_golden)),
)
