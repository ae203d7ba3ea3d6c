# SPDX-License-Identifier: Apache-2.0
"""Declaration of final_adaln_out."""

from types import ModuleType

from rlk import backends
from rlk.operator import FLOATS, Claim, Limit, Operator, Reduction, Scalar, Tensor, Workload

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


# What no tensor core computes.
_EXACT = ("act", "mean", "rstd", "dbias")
_PRODUCTS = ("out", "mod", "dx", "dtemb", "dweight")

OPERATOR = Operator(
    name="final_adaln_out",
    package="rlk_qwenimage",
    bits_version=1,
    formula="out = (x - mean) * rstd * (1 + scale) + shift, (scale, shift) = mod, "
    "mod = silu(temb) @ weight^T + bias",
    inputs=(
        Tensor("x", ("...", "S", "H"), FLOATS, gradient="row"),
        Tensor("temb", ("...", "K"), ("=x",), gradient="row"),
        Tensor("weight", ("N", "K"), ("=x",), gradient="chain"),
        Tensor("bias", ("N",), ("=x", "float32"), gradient="parameter"),
    ),
    scalars=(Scalar("eps", 1e-6, minimum=0.0, also=(0.1,)),),
    outputs=(Tensor("out", ("...", "S", "H"), ("=x",)),),
    saved=(
        Tensor("act", ("...", "K"), ("=x",)),
        Tensor("mod", ("...", "N"), ("=x",)),
        Tensor("mean", ("...", "S"), ("float32",)),
        Tensor("rstd", ("...", "S"), ("float32",)),
    ),
    limits=(Limit(2, "H", "N", exactly=True),),
    reductions=(
        Reduction("mod", "mma_chain", "K"),
        Reduction("mean", "row_sum", "H"),
        Reduction("rstd", "row_sum", "H"),
        Reduction("dx", "row_sum", "H"),
        # Over tokens into the gradient of mod, which is rounded, and over samples from there.
        Reduction("dbias", "exact_sum", "S"),
        Reduction("dbias", "exact_sum", "T"),
        Reduction("dtemb", "mma_chain", "N"),
        Reduction("dweight", "mma_chain", "T"),
    ),
    category="product",
    casts=("act", "mod"),
    claims=(
        Claim("repeatable", (*_EXACT, *_PRODUCTS)),
        Claim("batch_invariant", ("out", "act", "mod", "mean", "rstd", "dx", "dtemb")),
        Claim("order_free", ("dbias",)),
        Claim("backend_equal", _EXACT),
        Claim("backend_equal", _PRODUCTS, among=("triton", "cuda")),
        Claim("gpu_to_gpu", _EXACT),
    ),
    workloads=(
        Workload(
            "end of Qwen-Image, 1024x1024",
            {"T": 1, "S": 4096, "H": 3072, "K": 3072, "N": 6144},
        ),
        Workload(
            "end of Qwen-Image, 1328x1328",
            {"T": 1, "S": 6889, "H": 3072, "K": 3072, "N": 6144},
        ),
        Workload(
            "end of Qwen-Image, guided pair",
            {"T": 2, "S": 4096, "H": 3072, "K": 3072, "N": 6144},
        ),
        Workload(
            "end of Qwen-Image, many short samples",
            {"T": 2048, "S": 3, "H": 3072, "K": 3072, "N": 6144},
        ),
    ),
    # 72: four steps of 16 and a half; 54: no whole vectors of 16 bytes.
    gate_sizes={"S": 3, "H": 54, "K": 72, "N": 108},
    odd_sizes=(
        {"S": 1, "H": 33, "K": 1, "N": 66},
        {"S": 5, "H": 264, "K": 100, "N": 528},
        {"S": 2, "H": 37, "K": 257, "N": 74},
        # Last: more tokens than one block of the sums, which the rules of PTX see here alone.
        {"S": 33, "H": 65, "K": 16, "N": 130},
    ),
    oracle=oracle.forward,
    backends=(
        backends.cuda(_load_cuda),
        backends.triton(_load_triton),
        backends.golden(_load_golden),
    ),
)
