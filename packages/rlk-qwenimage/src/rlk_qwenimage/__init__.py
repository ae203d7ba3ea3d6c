# SPDX-License-Identifier: Apache-2.0
"""Adaptive layer normalisation of Qwen-Image: same bits for a sample in any batch."""

from rlk_qwenimage.adaln_mod_projection import (
    BlockModulation,
    FinalModulation,
    Modulation,
    ModulationLinear,
    adaln_mod_projection,
)

__all__ = [
    "BlockModulation",
    "FinalModulation",
    "Modulation",
    "ModulationLinear",
    "adaln_mod_projection",
]
__version__ = "0.1.0"
