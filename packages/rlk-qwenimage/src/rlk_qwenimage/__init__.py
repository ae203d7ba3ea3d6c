# SPDX-License-Identifier: Apache-2.0
"""Adaptive layer normalisation of Qwen-Image: same bits for a sample in any batch."""

from rlk.patching import PatchReport
from rlk_qwenimage.adaln_mod_projection import (
    BlockModulation,
    FinalModulation,
    Modulation,
    ModulationLinear,
    adaln_mod_projection,
)
from rlk_qwenimage.final_adaln_out import AdaLayerNormContinuous, final_adaln_out
from rlk_qwenimage.layer_norm_modulate import layer_norm_modulate
from rlk_qwenimage.patching import PatchSite, patch, unpatch

__all__ = [
    "AdaLayerNormContinuous",
    "BlockModulation",
    "FinalModulation",
    "Modulation",
    "ModulationLinear",
    "PatchReport",
    "PatchSite",
    "adaln_mod_projection",
    "final_adaln_out",
    "layer_norm_modulate",
    "patch",
    "unpatch",
]
__version__ = "0.1.0"
