# SPDX-License-Identifier: Apache-2.0
"""The RMS norms of diffusers, computed by the operator of another package. Imports diffusers."""

import torch
from diffusers.models import normalization as theirs

from rlk import registry

_norm = registry.public_function(registry.find("rms_norm"))


class RMSNorm(theirs.RMSNorm):
    """The norm of queries, keys or text."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The normalised rows of hidden_states [..., N]."""
        return _norm(hidden_states, self.weight, self.eps)
