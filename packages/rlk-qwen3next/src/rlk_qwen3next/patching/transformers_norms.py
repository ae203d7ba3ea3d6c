# SPDX-License-Identifier: Apache-2.0
"""The norms of transformers' Qwen3-Next, computed by our operators. Imports transformers.

Each class keeps the name of its base: wrapping policies and initialisation go by it.
"""

from transformers.models.qwen3_next import modeling_qwen3_next as theirs

import rlk_qwen3next

from .sites import Replacement


class Qwen3NextRMSNorm(theirs.Qwen3NextRMSNorm):
    """The zero-centred norm."""

    exact_sums = rlk_qwen3next.Qwen3NextRMSNorm.exact_sums
    weight_sum = None
    forward = rlk_qwen3next.Qwen3NextRMSNorm.forward


class Qwen3NextRMSNormGated(theirs.Qwen3NextRMSNormGated):
    """The norm that closes a Gated DeltaNet block."""

    # Older modules compute silu without saying so; newer ones have an attribute of their own.
    activation = "silu"
    exact_sums = rlk_qwen3next.Qwen3NextRMSNormGated.exact_sums
    weight_sum = None
    forward = rlk_qwen3next.Qwen3NextRMSNormGated.forward


REPLACEMENTS: tuple[Replacement, ...] = (
    Replacement(theirs.Qwen3NextRMSNorm, Qwen3NextRMSNorm, rlk_qwen3next.Qwen3NextRMSNorm, "eps"),
    Replacement(
        theirs.Qwen3NextRMSNormGated,
        Qwen3NextRMSNormGated,
        rlk_qwen3next.Qwen3NextRMSNormGated,
        "variance_epsilon",
    ),
)
