# SPDX-License-Identifier: Apache-2.0
"""Declaration of rms_norm_vllm: rms_norm with the reciprocal root of NVIDIA GPUs."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from rlk import backends
from rlk.operator import Claim, Operator, Scalar, Workload

from ..rms_norm.operator import OPERATOR as RMS_NORM
from . import oracle

BACKENDS = ("cuda", "triton")
ELSEWHERE = f"use {RMS_NORM.name} with rounding='ieee'"


def _load_cuda() -> ModuleType:
    from rlk.cuda import launch

    source = Path(__file__).with_name("kernel_cuda.cu")
    return launch.module(OPERATOR, source, finishes_sums=True)


def _load_triton() -> ModuleType:
    from . import kernel_triton

    return kernel_triton


def with_hardware_root(scalars: Iterable[Scalar]) -> tuple[Scalar, ...]:
    """The scalars of a base, of this rounding."""
    return tuple(replace(s, default="vllm") if s.name == "rounding" else s for s in scalars)


def claims_of(base: Operator, matched: tuple[str, ...]) -> tuple[Claim, ...]:
    """What such a variant claims: no CPU has its bits, and nobody promises them on other GPUs.

    `matched` are the tensors with the bits of the engine's kernels.
    """
    kept = [c for c in base.claims if c.word not in ("backend_equal", "gpu_to_gpu")]
    equal = Claim("backend_equal", base.claimed("backend_equal"), among=BACKENDS)
    return (*kept, equal, Claim("rollout_equal", matched))


OPERATOR = replace(
    RMS_NORM,
    name="rms_norm_vllm",
    formula="y = x * rstd * (weight_offset + weight), rstd = rsqrt(sum(x^2) / N + eps)",
    scalars=with_hardware_root(RMS_NORM.scalars),
    claims=claims_of(RMS_NORM, ("y",)),
    workloads=(
        *RMS_NORM.workloads,
        # The engine's figures name this width too.
        Workload("linear attention head of Qwen3-Next", {"T": 262144, "N": 128}),
    ),
    oracle=oracle.forward,
    backends=(backends.cuda(_load_cuda), backends.triton(_load_triton, interpreted=False)),
    elsewhere=ELSEWHERE,
)
