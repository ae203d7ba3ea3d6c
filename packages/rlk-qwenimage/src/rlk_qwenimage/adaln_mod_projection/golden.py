# SPDX-License-Identifier: Apache-2.0
"""Which bits are right outside the products: FP32, each operation rounded once.

Of the products themselves golden has the values; tensor cores have bits of their own.
"""

import torch

from rlk.launch import start_golden
from rlk.math.golden import silu, silu_derivative
from rlk.reduce import exact_sum
from rlk.reduce.mma_chain.golden import product


def forward(
    temb: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mod [T, N], act [T, K])"""
    start_golden("adaln_mod_projection_forward", __file__)
    act = silu(temb.float()).to(temb.dtype)
    return product(act, weight, bias, None, temb.dtype), act


def backward(
    dmod: torch.Tensor,
    temb: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    act: torch.Tensor,
    *,
    needs: frozenset[str],
    initial: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(dtemb [T, K], dweight [N, K], exact state of dbias [13, N])"""
    start_golden("adaln_mod_projection_backward", __file__)
    dtemb = dweight = state = None
    if "temb" in needs:
        # ORDER: the chain runs along N.
        dact = product(dmod, weight.t(), None, None, torch.float32)
        dtemb = (dact * silu_derivative(temb.float())).to(temb.dtype)
    if "weight" in needs:
        # ORDER: the chain runs along T, samples ascending, from where earlier ones left it.
        dtype = weight.dtype if initial is None else torch.float32
        dweight = product(dmod.t(), act.t(), None, initial, dtype)
    if "bias" in needs:
        empty = exact_sum.new(dmod.shape[1], dmod.device)
        state = exact_sum.add_rows(empty, dmod, backend="golden")
    return dtemb, dweight, state
