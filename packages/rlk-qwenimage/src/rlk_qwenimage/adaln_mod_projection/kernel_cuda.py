# SPDX-License-Identifier: Apache-2.0
"""adaln_mod_projection in CUDA: steps of kernel_cuda.cu around products of the MMA chain."""

from pathlib import Path

import torch

from rlk.cuda.header import Layout
from rlk.cuda.launch import DTYPE_CODES, current_stream
from rlk.cuda.steps import Steps
from rlk.reduce.exact_sum import kernel_cuda as exact_sum
from rlk.reduce.exact_sum.golden import new
from rlk.reduce.mma_chain import kernel_cuda as mma_chain

_ACTIVATION = Layout(
    "AdalnActivation",
    (
        ("const void*", "dact"),
        ("const void*", "temb"),
        ("void*", "out"),
        ("long long", "row_stride"),
        ("long long", "column_stride"),
        ("long long", "rows"),
        ("long long", "columns"),
        ("void*", "stream"),
        ("int", "dtype"),
        ("int", "device"),
    ),
)

steps = Steps(
    "adaln_mod_projection",
    Path(__file__).with_name("kernel_cuda.cu"),
    {"activation": _ACTIVATION, "activation_gradient": _ACTIVATION},
)
launches = (steps, *mma_chain.launches, *exact_sum.launches)


def forward(
    temb: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mod [T, N], act [T, K])"""
    act = _step("activation", temb, None)
    return mma_chain.product(act, weight, bias, None, temb.dtype), act


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
    dtemb = dweight = state = None
    if "temb" in needs:
        # ORDER: the chain runs along N.
        dact = mma_chain.product(dmod, weight.t(), None, None, torch.float32)
        dtemb = _step("activation_gradient", temb, dact)
        # Free before dweight is allocated.
        del dact
    if "weight" in needs:
        # ORDER: the chain runs along T, samples ascending, from where earlier ones left it.
        dtype = weight.dtype if initial is None else torch.float32
        dweight = mma_chain.product(dmod.t(), act.t(), None, initial, dtype)
    if "bias" in needs:
        state = exact_sum.add_rows(new(dmod.shape[1], dmod.device), dmod)
    return dtemb, dweight, state


def _step(entry: str, temb: torch.Tensor, dact: torch.Tensor | None) -> torch.Tensor:
    """A new contiguous tensor like temb [T, K]; `dact` is contiguous."""
    out = torch.empty(temb.shape, dtype=temb.dtype, device=temb.device)
    device = temb.get_device()
    steps.launch(
        entry, device, 0 if dact is None else dact.data_ptr(), temb.data_ptr(), out.data_ptr(),
        *temb.stride(), *temb.shape, current_stream(device), DTYPE_CODES[temb.dtype], device,
    )  # fmt: skip
    return out
