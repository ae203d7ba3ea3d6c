# SPDX-License-Identifier: Apache-2.0
"""The RMS norms of diffusers, computed by the operator of another package. Imports diffusers."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from diffusers.models import normalization as theirs

from rlk import registry

_norm = registry.public_function(registry.find("rms_norm"))


class RMSNorm(theirs.RMSNorm):
    """The norm of queries, keys or text."""

    exact_sums: ClassVar[Mapping[str, str]] = {"weight": "weight_sum"}
    weight_sum: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The normalised rows of hidden_states [..., N]."""
        return _norm(hidden_states, self.weight, self.eps, weight_sum=self.weight_sum)
