# SPDX-License-Identifier: Apache-2.0
"""The calls of the CUDA backend, by launchers that compute on the host."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rlk
from rlk import dispatch
from rlk.compare import assert_same_bits
from rlk.cuda import steps as steps_module
from rlk.errors import ArgumentError
from rlk.execution import Execution
from rlk.reduce.exact_sum import kernel_cuda as exact_sum
from rlk.reduce.exact_sum.form import SumForm
from rlk.reduce.mma_chain import kernel_cuda as mma_chain
from rlk.test_support import small_integers

from . import kernel_cuda
from .operator import OPERATOR

STREAM = 4096
# Of CPU tensors, as torch numbers it.
HERE = -1


def at(pointer, kind, shape, strides):
    """The elements of this memory, to read and to write."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    flat = np.ctypeslib.as_array((kind * (last + 1)).from_address(pointer))
    bytes_apart = [flat.itemsize * stride for stride in strides]
    return np.lib.stride_tricks.as_strided(flat, shape, bytes_apart)


def floats(pointer, shape, strides=None):
    return at(pointer, ctypes.c_float, shape, strides or (shape[1], 1))


def activation(a):
    """Not SiLU but twice its argument: exact for small integers."""
    temb = floats(a.temb, (a.rows, a.columns), (a.row_stride, a.column_stride))
    floats(a.out, temb.shape)[...] = 2 * temb


def activation_gradient(a):
    temb = floats(a.temb, (a.rows, a.columns), (a.row_stride, a.column_stride))
    floats(a.out, temb.shape)[...] = floats(a.dact, temb.shape) * temb


def product(a):
    left = floats(a.a, (a.M, a.K), (a.a_stride_m, a.a_stride_k))
    right = floats(a.b, (a.N, a.K), (a.b_stride_n, a.b_stride_k))
    total = left @ right.T
    if a.bias:
        total = total + floats(a.bias, (1, a.N), (0, a.bias_stride))
    if a.initial:
        total = total + floats(a.initial, total.shape, (a.initial_stride_m, a.initial_stride_n))
    floats(a.out, total.shape)[...] = total


def sum_rows(a):
    """Not digits but whole sums, in the first row of the state."""
    rows = floats(a.source, (a.count, a.columns), (a.row_stride, a.column_stride))
    if a.form == SumForm.ROUNDED:
        floats(a.sums, (1, a.columns))[...] = rows.sum(0)
        return
    kind = ctypes.c_double if a.form == SumForm.CARRIED else ctypes.c_longlong
    state = at(a.state, kind, (13, a.columns), (a.columns, 1))
    state[...] = 0
    state[0] = rows.sum(0)
    if a.form == SumForm.CARRIED:
        floats(a.sums, (1, a.columns))[...] = 0


LAUNCHERS = {
    "rlk_adaln_mod_projection_activation": activation,
    "rlk_adaln_mod_projection_activation_gradient": activation_gradient,
    "rlk_mma_chain_product": product,
    "rlk_exact_sum_sum_rows": sum_rows,
}
LAYOUTS = {
    f"rlk_{steps.name}_{entry}": layout
    for steps in (kernel_cuda.steps, mma_chain.steps, exact_sum.steps)
    for entry, layout in steps.entries.items()
}


def function(name, arguments):
    layout = LAYOUTS[name]

    def call(packed):
        names = [field for _, field in layout.fields]
        a = SimpleNamespace(**dict(zip(names, layout.packer.unpack(packed), strict=True)))
        assert (a.stream, a.device, a.dtype) == (STREAM, HERE, 0)
        LAUNCHERS[name](a)
        return 0

    return call


@pytest.fixture
def execution(monkeypatch):
    """The operator on its CUDA backend, loaded for the CPU."""
    binary = SimpleNamespace(function=function, digest="", check=lambda status, what: None)
    monkeypatch.setattr(steps_module, "binary_for", lambda *arguments: binary)
    for module in (kernel_cuda, mma_chain, exact_sum):
        monkeypatch.setattr(module.steps, "_loaded", {})
        monkeypatch.setattr(module, "current_stream", lambda device: STREAM)
    choice = dispatch.Choice(OPERATOR.backends[1], kernel_cuda, ())
    monkeypatch.setattr(dispatch, "choose", lambda operator, device, requested: choice)
    return Execution(OPERATOR)


def whole(*shape, seed=0):
    """Numbers of 1 to 9: products and sums by whichever code are exact, and none is -0."""
    return small_integers(*shape, seed=seed) + 5


def inputs(*leading, n=6, k=5):
    return whole(*leading, k), whole(n, k, seed=1), whole(n, seed=2)


STRIDES = {
    "rows": lambda t: t,
    "columns apart": lambda t: torch.stack([t, t], -1)[..., 1],
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
}


@pytest.mark.parametrize("leading", [(), (1,), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("strides", STRIDES)
def test_forward_and_backward_equal_products_by_hand(execution, leading, strides):
    temb, weight, bias = map(STRIDES[strides], inputs(*leading))
    dmod = STRIDES[strides](whole(*leading, 6, seed=3))
    for _ in range(2):
        mod, act = execution.forward(temb, weight, bias, "cuda")
        assert_same_bits(act, 2 * temb)
        assert_same_bits(mod, 2 * temb @ weight.t() + bias)
        for needs in ((True, True, True), (True, False, False), (False, True, False)):
            tensors = (dmod, temb, weight, bias, act)
            results = execution.run_backward(tensors, (), needs, "cuda")
            rows = dmod.reshape(-1, 6)
            wanted = dmod @ weight * temb, rows.t() @ act.reshape(-1, 5), rows.sum(0)
            assert [r is not None for r in results] == list(needs)
            for result, want in zip(results[:2], wanted[:2], strict=True):
                if result is not None:
                    assert_same_bits(result, want)
            if results[2] is not None:
                assert results[2].tolist() == [wanted[2].tolist(), *[[0] * 6] * 12]


@pytest.mark.parametrize("leading", [(3,), (2, 3)], ids=str)
def test_backward_of_a_bias_in_each_form_is_one_launch(execution, leading):
    (temb, weight, bias), dmod = inputs(*leading), whole(*leading, 6, seed=3)
    # Planned, and of rows that no view flattens.
    for x in (temb, temb.transpose(0, -1).contiguous().transpose(0, -1)):
        tensors, wanted = (dmod, x, weight, bias, 2 * x), dmod.reshape(-1, 6).sum(0)
        for form in SumForm:
            forms = (SumForm.STATE, SumForm.STATE, form)
            with rlk.trace() as launches:
                *_, found = execution.run_backward(
                    tensors, (), (False, False, True), "cuda", None, forms
                )
            assert [w.kernel for w in launches] == ["exact_sum.sum_rows"]
            if form == SumForm.ROUNDED:
                assert_same_bits(found, wanted)
                continue
            state, *zeros = found if form == SumForm.CARRIED else (found,)
            assert state.dtype == (torch.float64 if form == SumForm.CARRIED else torch.int64)
            assert state.tolist() == [wanted.tolist(), *[[0] * 6] * 12]
            for each in zeros:
                assert_same_bits(each, torch.zeros(6))


def test_chained_backward_goes_on_from_the_chain_that_it_is_given(execution):
    (temb, weight, bias), dmod = inputs(3), whole(3, 6, seed=3)
    initial, act = whole(6, 5, seed=4), 2 * temb
    for start in (initial, initial + 1):
        _, dweight, _ = execution.run_backward(
            (dmod, temb, weight, bias, act), (), (False, True, False), "cuda", start
        )
        assert_same_bits(dweight, start + dmod.t() @ act)


def test_every_launch_names_operator_and_direction_planned_or_not(execution):
    (temb, weight, bias), dmod = inputs(2, 3), whole(2, 3, 6, seed=3)
    # Leading axes that no view flattens: these calls are made of rows.
    apart = temb.transpose(0, 1).contiguous().transpose(0, 1)
    for x in (temb, temb, apart):
        with rlk.trace() as launches:
            _, act = execution.forward(x, weight, bias, "cuda")
            execution.run_backward((dmod, x, weight, bias, act), (), (True,) * 3, "cuda")
        assert [(w.operator, w.direction, w.kernel) for w in launches] == [
            (OPERATOR.name, direction, kernel)
            for direction, kernel in (
                ("forward", "adaln_mod_projection.activation"),
                ("forward", "mma_chain.product"),
                ("backward", "mma_chain.product"),
                ("backward", "adaln_mod_projection.activation_gradient"),
                ("backward", "mma_chain.product"),
                ("backward", "exact_sum.sum_rows"),
            )
        ]


def test_planned_call_of_a_tensor_without_memory_is_refused(execution):
    temb, weight, bias = inputs(3)
    execution.forward(temb, weight, bias, "cuda")
    with pytest.raises(ArgumentError, match="weight must be a plain tensor .* without memory"):
        execution.forward(temb, torch._efficientzerotensor((6, 5)), bias, "cuda")
