# SPDX-License-Identifier: Apache-2.0
"""Declaration of multi_axis_rope_qk: multi_axis_rope on two tensors of one sequence."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

from rlk import backends
from rlk.operator import FLOATS, Claim, Tensor, Workload

from ..multi_axis_rope.operator import OPERATOR as ONE
from ..multi_axis_rope.operator import QWEN3_NEXT
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


_QWEN_IMAGE = {"H": 24, "D": 128, "G": 24, "P": 64}
_RESULTS = ("q_out", "k_out", "dq", "dk")
_WORDS = ("repeatable", "batch_invariant", "backend_equal", "gpu_to_gpu")

OPERATOR = replace(
    ONE,
    name="multi_axis_rope_qk",
    inputs=(
        Tensor("q", ("...", "H", "D"), FLOATS, gradient="row"),
        Tensor("k", ("...", "G", "D"), ("=q",), gradient="row"),
        *ONE.inputs[1:],
    ),
    outputs=(
        Tensor("q_out", ("...", "H", "D"), ("=q",)),
        Tensor("k_out", ("...", "G", "D"), ("=k",)),
    ),
    claims=tuple(Claim(word, _RESULTS) for word in _WORDS),
    workloads=(
        Workload(
            "Qwen-Image, 1024x1024",
            {"T": 4096, **_QWEN_IMAGE},
            layouts=("packed", "contiguous"),
        ),
        Workload(
            "Qwen-Image, 128 tokens of text",
            {"T": 128, **_QWEN_IMAGE},
            layouts=("packed", "contiguous"),
        ),
        QWEN3_NEXT("attention of Qwen3-Next", {"T": 8192, "H": 16, "D": 256, "G": 2, "P": 32}),
    ),
    oracle=oracle.forward,
    backends=(
        backends.cuda(_load_cuda),
        backends.triton(_load_triton),
        backends.golden(_load_golden),
    ),
    # As many heads and fewer, more than a thread or a tile takes, and the sizes of one tensor.
    odd_sizes=(
        {"H": 1, "D": 2, "G": 1, "P": 1},
        {"H": 9, "D": 7, "G": 2, "P": 2},
        {"H": 5, "D": 24, "G": 5, "P": 12},
        {"H": 9, "D": 48, "G": 3, "P": 16},
        {"H": 2, "D": 130, "G": 7, "P": 65},
    ),
)
