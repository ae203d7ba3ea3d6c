# SPDX-License-Identifier: Apache-2.0
"""The zero-centred normalisation as a module."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from rlk.arguments import check_scalars, check_sizes
from rlk.operator import Operator

from . import qwen3_next_rms_norm
from .operator import OPERATOR


class Qwen3NextRMSNorm(nn.Module):
    """`qwen3_next_rms_norm` with a weight initialised to 0, as in transformers.

    Args:
        dim: N, the length of a row.
        eps: added to the mean square; unitless.
    Raises:
        ArgumentError: dim is no length of a row, or eps not one the operator defines.
    """

    operator: ClassVar[Operator] = OPERATOR
    exact_sums: ClassVar[Mapping[str, str]] = {"weight": "weight_sum"}
    weight_sum: torch.Tensor | None = None

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        check_sizes("Qwen3NextRMSNorm", dim=dim)
        check_scalars(OPERATOR, {**{s.name: s.default for s in OPERATOR.scalars}, "eps": eps})
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The normalised rows of x [..., N]."""
        return qwen3_next_rms_norm(x, self.weight, self.eps, weight_sum=self.weight_sum)

    def extra_repr(self) -> str:
        """Shape and eps, as transformers prints them."""
        return f"{tuple(self.weight.shape)}, eps={self.eps}"
