# SPDX-License-Identifier: Apache-2.0
"""The gated normalisation as a module."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from rlk.arguments import check_scalars, check_sizes
from rlk.operator import Operator

from . import rms_norm_gated
from .operator import OPERATOR


class Qwen3NextRMSNormGated(nn.Module):
    """`rms_norm_gated` with a weight initialised to 1, as in transformers.

    Args:
        hidden_size: N, the length of a row.
        eps: added to the mean square; unitless.
        activation: "silu", "swish" or "sigmoid"; checked here, fixed for the module's life.
        device: where the weight lives.
        dtype: of the weight.
    Raises:
        ArgumentError: hidden_size is no length of a row, or the activation or eps not one the
            operator defines.
    """

    operator: ClassVar[Operator] = OPERATOR
    exact_sums: ClassVar[Mapping[str, str]] = {"weight": "weight_sum"}
    weight_sum: torch.Tensor | None = None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        activation: str = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes("Qwen3NextRMSNormGated", hidden_size=hidden_size)
        scalars = {"eps": eps, "activation": activation, "weight_offset": 0.0}
        checked = check_scalars(OPERATOR, scalars)
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.variance_epsilon = eps
        self.activation = checked["activation"]

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """The normalised, gated rows of hidden_states [..., N] and gate [..., N]."""
        return rms_norm_gated(
            hidden_states,
            gate,
            self.weight,
            self.variance_epsilon,
            self.activation,
            weight_sum=self.weight_sum,
        )

    def extra_repr(self) -> str:
        """Shape, eps and activation."""
        shape = tuple(self.weight.shape)
        return f"{shape}, eps={self.variance_epsilon}, activation={self.activation!r}"
