# SPDX-License-Identifier: Apache-2.0
"""Declaration of multi_axis_rope."""

from functools import partial
from pathlib import Path
from types import ModuleType

from rlk import backends
from rlk.operator import FLOATS, Claim, Limit, Operator, Scalar, Tensor, Workload

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


SCALARS = (
    Scalar("interleaved", True, also=(False,)),
    Scalar("rounding", "separate", choices=("separate", "complex_eager")),
)
LIMITS = (Limit(2, "P", "D"),)
_HEADS = {"H": 24, "D": 128, "P": 64}
_QWEN_IMAGE = partial(Workload, layouts=("packed", "contiguous"))
QWEN3_NEXT = partial(Workload, arguments={"rotary_dim": 64}, scalars={"interleaved": False})

OPERATOR = Operator(
    name="multi_axis_rope",
    package="rlk_rope",
    bits_version=1,
    formula="y0 = x0 * cos - x1 * sin, y1 = x0 * sin + x1 * cos",
    inputs=(
        Tensor("x", ("...", "H", "D"), FLOATS, gradient="row"),
        Tensor("cos", ("...", "P"), ("float32",)),
        Tensor("sin", ("...", "P"), ("float32",)),
    ),
    scalars=SCALARS,
    outputs=(Tensor("y", ("...", "H", "D"), ("=x",)),),
    saved=(),
    reductions=(),
    category="elementwise",
    claims=(
        Claim("repeatable", ("y", "dx")),
        Claim("batch_invariant", ("y", "dx")),
        Claim("backend_equal", ("y", "dx")),
        Claim("gpu_to_gpu", ("y", "dx")),
    ),
    workloads=(
        _QWEN_IMAGE("Qwen-Image, 1024x1024", {"T": 4096, **_HEADS}),
        _QWEN_IMAGE("Qwen-Image, 1664x928", {"T": 6032, **_HEADS}),
        _QWEN_IMAGE("Qwen-Image, 1328x1328", {"T": 6889, **_HEADS}),
        _QWEN_IMAGE("Qwen-Image, 128 tokens of text", {"T": 128, **_HEADS}),
        QWEN3_NEXT("query of Qwen3-Next", {"T": 8192, "H": 16, "D": 256, "P": 32}),
        QWEN3_NEXT("key of Qwen3-Next", {"T": 8192, "H": 2, "D": 256, "P": 32}),
    ),
    oracle=oracle.forward,
    backends=(
        backends.cuda(_load_cuda),
        backends.triton(_load_triton),
        backends.golden(_load_golden),
    ),
    row_axes=("B", "S"),
    limits=LIMITS,
    linear=True,
    # One pair; odd D; pairs that fill no 16-byte word, adjacent or split; words and a rest.
    odd_sizes=(
        {"H": 1, "D": 2, "P": 1},
        {"H": 3, "D": 7, "P": 2},
        {"H": 5, "D": 24, "P": 12},
        {"H": 9, "D": 48, "P": 16},
        {"H": 1, "D": 1000, "P": 500},
        {"H": 2, "D": 130, "P": 65},
    ),
)
