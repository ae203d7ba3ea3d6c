# SPDX-License-Identifier: Apache-2.0
"""The normalisation as a module."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from rlk.arguments import check_scalars
from rlk.operator import Operator

from . import rms_norm
from .operator import OPERATOR


class RMSNorm(nn.Module):
    """`rms_norm` with a weight initialised to 1.

    Args:
        hidden_size: N, the length of a row.
        eps: added to the mean square; unitless.
    Raises:
        ArgumentError: eps is not one the operator defines.
    """

    operator: ClassVar[Operator] = OPERATOR
    exact_sums: ClassVar[Mapping[str, str]] = {"weight": "weight_sum"}
    weight_sum: torch.Tensor | None = None

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        check_scalars(OPERATOR, {**{s.name: s.default for s in OPERATOR.scalars}, "eps": eps})
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The normalised rows of x [..., N]."""
        return rms_norm(x, self.weight, self.eps, weight_sum=self.weight_sum)

    def extra_repr(self) -> str:
        """Shape and eps, as torch prints them."""
        return f"{tuple(self.weight.shape)}, eps={self.eps}"
