# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: same bits for a token in any batch, forward and backward."""

from rlk_rope.multi_axis_rope import multi_axis_rope
from rlk_rope.multi_axis_rope_qk import multi_axis_rope_qk
from rlk_rope.positions import RopeTables, qwen_image_positions, rope_tables

__all__ = [
    "RopeTables",
    "multi_axis_rope",
    "multi_axis_rope_qk",
    "qwen_image_positions",
    "rope_tables",
]
__version__ = "0.1.0"
