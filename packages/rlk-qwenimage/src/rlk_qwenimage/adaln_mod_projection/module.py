# SPDX-License-Identifier: Apache-2.0
"""The projection as a layer."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from rlk.arguments import check_sizes
from rlk.errors import ArgumentError

from ..autocast import as_autocast
from . import _published


class ModulationLinear(nn.Linear):
    """A linear layer that takes the SiLU of what it reads, constructed as `torch.nn.Linear`.

    Args:
        in_features: K, the length of a row of temb.
        out_features: N, the length of mod.
        bias: must be True.
        device: where the parameters live.
        dtype: of the parameters.
    Raises:
        ArgumentError: bias is False, or a number of features below 1.
    """

    exact_sums: ClassVar[Mapping[str, str]] = {"bias": "bias_sum"}
    chain_sums: ClassVar[Mapping[str, str]] = {"weight": "weight_chain"}
    bias_sum: torch.Tensor | None = None
    weight_chain: tuple[torch.Tensor, torch.Tensor] | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes("ModulationLinear", in_features=in_features, out_features=out_features)
        if not bias:
            raise ArgumentError(f"ModulationLinear: bias must be True, got {bias!r}")
        super().__init__(in_features, out_features, device=device, dtype=dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """mod [..., N], of temb [..., K] without activation."""
        temb, weight, bias = as_autocast(input, self.weight, self.bias)
        carriers = (self.bias_sum, *(self.weight_chain or ()))
        (mod,) = _published((temb, weight, bias), {}, None, carriers)
        return mod
