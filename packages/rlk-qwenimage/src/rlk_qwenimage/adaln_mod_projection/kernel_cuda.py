# SPDX-License-Identifier: Apache-2.0
"""adaln_mod_projection in CUDA: steps of kernel_cuda.cu around products of the MMA chain."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from rlk.cuda.header import Layout
from rlk.cuda.launch import DTYPE_CODES, current_stream, pointers
from rlk.cuda.memory import allocator
from rlk.cuda.steps import Steps
from rlk.plans import Plan
from rlk.reduce.exact_sum import kernel_cuda as exact_sum
from rlk.reduce.exact_sum.form import SumForm
from rlk.reduce.mma_chain import kernel_cuda as mma_chain

from .operator import OPERATOR

# Of temb, weight and bias; that of bias in the form that is asked for.
Gradients: TypeAlias = tuple[torch.Tensor | None, torch.Tensor | None, Any]

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
# backward and plan_backward take the forms of sums.
finishes_sums = True


def forward(
    temb: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mod [T, N], act [T, K])"""
    tensors = (temb, weight, bias)
    shapes = ((temb.shape[0], weight.shape[0]), temb.shape)
    return _forward(tensors, shapes, None)(*[t.data_ptr() for t in tensors])


def backward(
    dmod: torch.Tensor,
    temb: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    act: torch.Tensor,
    *,
    needs: frozenset[str],
    forms: Mapping[str, SumForm] = MappingProxyType({}),
    initial: torch.Tensor | None = None,
) -> Gradients:
    """(dtemb [T, K], dweight [N, K], exact state of dbias [13, N], or what `forms` has it be)"""
    tensors = (dmod, temb, weight, bias, act)
    needed = ("temb" in needs, "weight" in needs, "bias" in needs)
    form = forms.get("bias", SumForm.STATE)
    run = _backward(tensors, temb.shape, needed, form, None, initial)
    return run(*[t.data_ptr() for t in tensors])


def plan_forward(
    rows: Sequence[torch.Tensor],
    shapes: Sequence[Sequence[int]],
    call: tuple[str, str] | None = None,
) -> Plan:
    """`forward` for all calls that look alike, as `rlk.cuda.launch.KernelModule` has it."""
    run, read = _forward(rows, shapes, call), OPERATOR.inputs
    return lambda tensors, scalars: run(*pointers(OPERATOR, read, tensors))


def plan_backward(
    rows: Sequence[torch.Tensor],
    shapes: Sequence[Sequence[int] | None],
    call: tuple[str, str] | None = None,
    *,
    forms: Sequence[SumForm] = (),
) -> Plan:
    """`backward` for all calls that look alike, as `rlk.cuda.launch.KernelModule` has it."""
    needed = [shape is not None for shape in shapes]
    form = forms[-1] if forms else SumForm.STATE
    run = _backward(rows, shapes[0] or (), needed, form, call, None)
    read = OPERATOR.outputs + OPERATOR.inputs + OPERATOR.saved
    return lambda tensors, scalars: run(*pointers(OPERATOR, read, tensors))


def _forward(
    rows: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], call: tuple[str, str] | None
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """From the pointers to the inputs to results of these shapes."""
    temb, weight, bias = rows
    activate = _plan_step("activation", temb, shapes[1], call)
    like_act = torch.empty_like(temb, memory_format=torch.contiguous_format)
    multiply = mma_chain.plan_product(
        like_act, weight, bias, None, temb.dtype, shape=shapes[0], call=call
    )

    def run(temb: int, weight: int, bias: int) -> tuple[torch.Tensor, torch.Tensor]:
        act = activate(0, temb)
        return multiply(act.data_ptr(), weight, bias), act

    return run


def _backward(
    rows: Sequence[torch.Tensor],
    shape: Sequence[int],
    needed: Sequence[bool],
    form: SumForm,
    call: tuple[str, str] | None,
    initial: torch.Tensor | None,
) -> Callable[..., Gradients]:
    """From the pointers to what backward reads to the gradients needed.

    `shape` is of dtemb, and `form` of dbias.
    """
    dmod, temb, weight, bias, act = rows
    need_temb, need_weight, need_bias = needed
    if need_temb:
        # ORDER: the chain runs along N.
        to_dact = mma_chain.plan_product(dmod, weight.t(), None, None, torch.float32, call=call)
        to_dtemb = _plan_step("activation_gradient", temb, shape, call)
    if need_weight:
        # ORDER: the chain runs along T, samples ascending, from where earlier ones left it.
        dtype = weight.dtype if initial is None else torch.float32
        to_dweight = mma_chain.plan_product(dmod.t(), act.t(), None, initial, dtype, call=call)
        start = 0 if initial is None else initial.data_ptr()
    if need_bias:
        to_dbias = exact_sum.plan_sum_rows(dmod, bias, form, call)

    def run(dmod: int, temb: int, weight: int, bias: int, act: int) -> Gradients:
        dtemb = dweight = dbias = None
        if need_temb:
            dact = to_dact(dmod, weight)
            dtemb = to_dtemb(dact.data_ptr(), temb)
            # Free before dweight is allocated, but not before dtemb is.
            del dact
        if need_weight:
            dweight = to_dweight(dmod, act, 0, start)
        if need_bias:
            dbias = to_dbias(dmod)
        return dtemb, dweight, dbias

    return run


def _plan_step(
    entry: str, temb: torch.Tensor, shape: Sequence[int], call: tuple[str, str] | None
) -> Callable[[int, int], torch.Tensor]:
    """From the pointers to a contiguous dact, or null, and to temb [T, K] to a new tensor."""
    device = temb.get_device()
    empty = allocator(shape, temb.dtype, temb.device)
    constants, code = (*temb.stride(), *temb.shape), DTYPE_CODES[temb.dtype]
    enqueue = steps.enqueuer(entry, device)

    def plan(dact: int, temb: int) -> torch.Tensor:
        out, stream = empty(), current_stream(device)
        enqueue(dact, temb, out.data_ptr(), *constants, stream, code, device, call=call)
        return out

    return plan
