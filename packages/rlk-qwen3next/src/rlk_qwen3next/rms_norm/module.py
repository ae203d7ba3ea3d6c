# SPDX-License-Identifier: Apache-2.0
"""The normalisation as a module."""

from collections.abc import Mapping
from typing import ClassVar, overload

import torch
from torch import nn

from rlk.arguments import check_scalars, check_sizes
from rlk.operator import Operator

from . import require_rounding, rms_norm
from .operator import OPERATOR


class RMSNorm(nn.Module):
    """`rms_norm` with a weight initialised to 1.

    Args:
        hidden_size: N, the length of a row.
        eps: added to the mean square; unitless.
        rounding: "ieee", or "vllm" for the bits of vLLM's kernels on NVIDIA GPUs.
    Raises:
        ArgumentError: hidden_size is no length of a row, or eps or rounding not one the operator
            defines.
    """

    operator: ClassVar[Operator] = OPERATOR
    exact_sums: ClassVar[Mapping[str, str]] = {"weight": "weight_sum"}
    weight_sum: torch.Tensor | None = None
    rounding: str = "ieee"

    def __init__(self, hidden_size: int, eps: float = 1e-6, rounding: str = "ieee") -> None:
        check_sizes("RMSNorm", hidden_size=hidden_size)
        check_scalars(OPERATOR, {**{s.name: s.default for s in OPERATOR.scalars}, "eps": eps})
        require_rounding(rounding)
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps
        self.rounding = rounding

    @overload
    def forward(self, x: torch.Tensor, residual: None = ...) -> torch.Tensor: ...

    @overload
    def forward(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The normalised rows of x [..., N]; with a residual those of the sum, and the sum."""
        return rms_norm(
            x,
            self.weight,
            self.eps,
            residual=residual,
            rounding=self.rounding,
            weight_sum=self.weight_sum,
        )

    def extra_repr(self) -> str:
        """Shape and eps, as torch prints them, and a rounding off the default."""
        shown = f"{tuple(self.weight.shape)}, eps={self.eps}"
        return shown if self.rounding == "ieee" else f"{shown}, rounding={self.rounding!r}"
