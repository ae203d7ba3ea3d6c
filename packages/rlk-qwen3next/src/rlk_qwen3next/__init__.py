# SPDX-License-Identifier: Apache-2.0
"""The normalisations of Qwen3-Next: same bits for a row in any batch, forward and backward."""

from rlk.patching import PatchReport
from rlk_qwen3next.patching import PatchSite, patch, unpatch
from rlk_qwen3next.qwen3_next_rms_norm import Qwen3NextRMSNorm, qwen3_next_rms_norm
from rlk_qwen3next.rms_norm import RMSNorm, rms_norm
from rlk_qwen3next.rms_norm_gated import Qwen3NextRMSNormGated, rms_norm_gated
from rlk_qwen3next.rms_norm_residual import rms_norm_residual
from rlk_qwen3next.rms_norm_residual_vllm import rms_norm_residual_vllm
from rlk_qwen3next.rms_norm_vllm import rms_norm_vllm

__all__ = [
    "PatchReport",
    "PatchSite",
    "Qwen3NextRMSNorm",
    "Qwen3NextRMSNormGated",
    "RMSNorm",
    "patch",
    "qwen3_next_rms_norm",
    "rms_norm",
    "rms_norm_gated",
    "rms_norm_residual",
    "rms_norm_residual_vllm",
    "rms_norm_vllm",
    "unpatch",
]
__version__ = "0.1.0"
