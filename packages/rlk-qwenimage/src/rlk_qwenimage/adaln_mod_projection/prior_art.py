# SPDX-License-Identifier: Apache-2.0
"""Other libraries' functions of the same formula, for the benchmark."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from rlk.bench.variants import Peer
from rlk.errors import BackendError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def in_torch(scalars: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """What diffusers runs: cuBLAS chooses another order for each number of samples."""
    return lambda temb, weight, bias: functional.linear(functional.silu(temb), weight, bias)


def starved(scalars: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """The same without a workspace, in which cuBLAS could split the sum; read when CUDA starts."""
    if os.environ.get(WORKSPACE) != ":0:0":
        raise BackendError(f"it needs {WORKSPACE}=:0:0 in the environment of the process")
    return in_torch(scalars)


def in_one_tile(scalars: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """Our own products in one fixed tile, not tuned, as batch-invariant modes compute them."""
    from .kernel_triton_prior_art import OneTile

    return lambda temb, weight, bias: OneTile.apply(functional.silu(temb), weight, bias)


# In FP32, the formula would multiply without tensor cores.
COMPILED = in_torch
PEERS = (
    Peer("F.linear(F.silu)", "torch", in_torch),
    Peer("F.linear, cuBLAS without a workspace", "torch", starved),
    Peer("fixed 64x64x64 tile, written here", "triton", in_one_tile),
)
