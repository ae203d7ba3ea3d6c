# SPDX-License-Identifier: Apache-2.0
"""Declaration of adaln_mod_projection."""

from types import ModuleType

from rlk import backends
from rlk.operator import FLOATS, Claim, Operator, Reduction, Tensor, Workload

from . import oracle


def _load_triton() -> ModuleType:
    from . import kernel_triton

    return kernel_triton


def _load_cuda() -> ModuleType:
    from . import kernel_cuda

    return kernel_cuda


def _load_golden() -> ModuleType:
    from . import golden

    return golden


OPERATOR = Operator(
    name="adaln_mod_projection",
    package="rlk_qwenimage",
    bits_version=1,
    formula="mod = act @ weight^T + bias, act = silu(temb) rounded to the dtype of temb",
    inputs=(
        Tensor("temb", ("...", "K"), FLOATS, gradient="row"),
        Tensor("weight", ("N", "K"), ("=temb",), gradient="chain"),
        Tensor("bias", ("N",), ("=temb", "float32"), gradient="parameter"),
    ),
    scalars=(),
    outputs=(Tensor("mod", ("...", "N"), ("=temb",)),),
    saved=(Tensor("act", ("...", "K"), ("=temb",)),),
    reductions=(
        Reduction("mod", "mma_chain", "K"),
        Reduction("dtemb", "mma_chain", "N"),
        Reduction("dweight", "mma_chain", "T"),
        Reduction("dbias", "exact_sum", "T"),
    ),
    category="product",
    casts=("act",),
    claims=(
        Claim("repeatable", ("mod", "act", "dtemb", "dweight", "dbias")),
        Claim("batch_invariant", ("mod", "act", "dtemb")),
        Claim("order_free", ("dbias",)),
        Claim("backend_equal", ("act", "dbias")),
        # Tensor cores add the products of a step in a way of their own.
        Claim("backend_equal", ("mod", "dtemb", "dweight"), among=("triton", "cuda")),
        Claim("gpu_to_gpu", ("act", "dbias")),
    ),
    workloads=(
        Workload(
            "image or text stream of a block of Qwen-Image",
            {"T": 2, "K": 3072, "N": 18432},
            {"stream": "img"},
        ),
        Workload("end of Qwen-Image", {"T": 2, "K": 3072, "N": 6144}, {"stream": "final"}),
    ),
    # 72: four steps of 16 and a half; 108: cut in six and in two, and no multiple of a tile.
    gate_sizes={"K": 72, "N": 108},
    odd_sizes=(
        {"K": 1, "N": 6},
        {"K": 16, "N": 130},
        {"K": 100, "N": 300},
        {"K": 257, "N": 66},
    ),
    oracle=oracle.forward,
    backends=(
        backends.cuda(_load_cuda),
        backends.triton(_load_triton),
        backends.golden(_load_golden),
    ),
)
