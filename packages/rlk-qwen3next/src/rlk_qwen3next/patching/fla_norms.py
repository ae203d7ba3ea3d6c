# SPDX-License-Identifier: Apache-2.0
"""The gated norm of flash-linear-attention, computed by our operator. Imports FLA.

Some releases of transformers build it in place of their own where FLA is installed.
"""

import torch
from fla import modules as theirs

import rlk_qwen3next
from rlk.errors import ArgumentError

from .sites import Replacement


class FusedRMSNormGated(theirs.FusedRMSNormGated):
    """The gated norm without FLA's options that add a residual before it."""

    exact_sums = rlk_qwen3next.Qwen3NextRMSNormGated.exact_sums
    weight_sum = None

    @property
    def variance_epsilon(self) -> float:
        """eps, by the name that our forward reads."""
        return self.eps

    def forward(
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> torch.Tensor:
        """The normalised, gated rows of x [..., N] and g [..., N]."""
        for name, value, wanted in (("residual", residual, None), ("prenorm", prenorm, False)):
            if value is not wanted:
                got = "a tensor" if isinstance(value, torch.Tensor) else value
                raise ArgumentError(
                    f"FusedRMSNormGated: {name} must be {wanted} in a patched model, got {got}; "
                    "unpatch it or add the residual before the call"
                )
        return rlk_qwen3next.Qwen3NextRMSNormGated.forward(self, x, g)


REPLACEMENTS: tuple[Replacement, ...] = (
    Replacement(
        theirs.FusedRMSNormGated, FusedRMSNormGated, rlk_qwen3next.Qwen3NextRMSNormGated, "eps"
    ),
)
