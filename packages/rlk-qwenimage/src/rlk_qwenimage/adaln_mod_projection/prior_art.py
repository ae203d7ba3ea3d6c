# SPDX-License-Identifier: Apache-2.0
"""Other libraries' functions of the same formula, for the benchmark."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from rlk.bench.variants import Peer


def in_torch(scalars: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """What diffusers runs: cuBLAS chooses another order for each number of samples."""
    return lambda temb, weight, bias: functional.linear(functional.silu(temb), weight, bias)


PEERS = (Peer("F.linear(F.silu)", "torch", in_torch),)
