# SPDX-License-Identifier: Apache-2.0
"""adaln_mod_projection in Triton: SiLU and its derivative around products of the MMA chain.

check_ptx: allow rcp.approx.ftz.f32 (`reciprocals` rounds it correctly)
"""

import torch
import triton
import triton.language as tl

from rlk.launch import launch_triton
from rlk.math.device_triton import silu, silu_derivative
from rlk.reduce.exact_sum.kernel_triton import sum_rows
from rlk.reduce.mma_chain.kernel_triton import product

# 1024: columns of a program; enough programs for one sample of 3072.
COLUMNS = 1024


@triton.jit
def place(columns, COLUMNS: tl.constexpr):
    """The row and the columns of a program, and which of these there are."""
    blocks = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    column = (program % blocks).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    return row, column, column < columns


@triton.jit
def activation(temb, act, columns, temb_row, temb_column, COLUMNS: tl.constexpr):
    row, column, mask = place(columns, COLUMNS)
    z = tl.load(temb + row * temb_row + column * temb_column, mask=mask, other=0.0)
    value = silu(z.to(tl.float32))
    tl.store(act + row * columns + column, value.to(act.dtype.element_ty), mask=mask)


@triton.jit
def activation_gradient(dact, temb, dtemb, columns, temb_row, temb_column, COLUMNS: tl.constexpr):
    row, column, mask = place(columns, COLUMNS)
    z = tl.load(temb + row * temb_row + column * temb_column, mask=mask, other=0.0)
    g = tl.load(dact + row * columns + column, mask=mask, other=0.0)
    value = g * silu_derivative(z.to(tl.float32))
    tl.store(dtemb + row * columns + column, value.to(dtemb.dtype.element_ty), mask=mask)


def forward(
    temb: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mod [T, N], act [T, K])"""
    act = torch.empty(temb.shape, dtype=temb.dtype, device=temb.device)
    launch_triton(
        activation, _grid(temb), temb, act, temb.shape[1], *temb.stride(), COLUMNS=COLUMNS
    )
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
    dtemb = dweight = state = None
    if "temb" in needs:
        # ORDER: the chain runs along N.
        dact = product(dmod, weight.t(), None, None, torch.float32)
        dtemb = torch.empty(temb.shape, dtype=temb.dtype, device=temb.device)
        launch_triton(
            activation_gradient, _grid(temb), dact, temb, dtemb, temb.shape[1], *temb.stride(),
            COLUMNS=COLUMNS,
        )  # fmt: skip
        # Free before dweight is allocated.
        del dact
    if "weight" in needs:
        # ORDER: the chain runs along T, samples ascending, from where earlier ones left it.
        dtype = weight.dtype if initial is None else torch.float32
        dweight = product(dmod.t(), act.t(), None, initial, dtype)
    if "bias" in needs:
        state = sum_rows(dmod)
    return dtemb, dweight, state


def _grid(temb: torch.Tensor) -> tuple[int]:
    return (temb.shape[0] * triton.cdiv(temb.shape[1], COLUMNS),)
