# SPDX-License-Identifier: Apache-2.0
"""vLLM's compiled kernel that adds before it normalises."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..rms_norm_vllm import rollout

_EPS = 1e-6


def _fused_add_rms_norm(
    kernels: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    # In place: y into x, the sum into residual.
    kernels.fused_add_rms_norm(x, residual, weight, _EPS)
    return x, residual


ENGINE = replace(
    rollout.ENGINE,
    recorded=rollout.recorded({"y": "fused_add_rms_norm", "residual_out": "fused_add_residual"}),
    inputs=lambda sizes: [rollout.tensors(sizes)[name] for name in ("x", "residual", "weight")],
    load=partial(rollout.load, _fused_add_rms_norm),
)
