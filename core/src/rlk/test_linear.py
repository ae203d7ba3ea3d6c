# SPDX-License-Identifier: Apache-2.0
"""Linear operators: nothing is kept of what they are linear in, and derivatives never end."""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlk import trace
from rlk.compare import assert_same_bits
from rlk.errors import RlkError
from rlk.launch import record
from rlk.operator import FLOATS, Backend, Tensor
from rlk.publish import publish
from rlk.test_support import small_integers, tiny_operator

ROW = ("...", "N")
asked: list[frozenset[str]] = []


def forward(x, z, factor):
    record("golden", "turn", "")
    return x * factor, z * factor.flip(-1)


def backward(dy, dv, x, z, factor, *, needs):
    record("golden", "turn_back", "")
    asked.append(needs)
    dx = dy * factor if "x" in needs else None
    return dx, dv * factor.flip(-1) if "z" in needs else None


BACKEND = SimpleNamespace(forward=forward, backward=backward)
DECLARED = tiny_operator(
    "linear_pair",
    inputs=(
        Tensor("x", ROW, FLOATS, gradient="row"),
        Tensor("z", ROW, FLOATS, gradient="row"),
        Tensor("factor", ROW, ("float32",)),
    ),
    scalars=(),
    outputs=(Tensor("y", ROW, ("=x",)), Tensor("v", ROW, ("=z",))),
    saved=(),
    reductions=(),
    linear=True,
    backends=(Backend("golden", lambda: BACKEND, ("cpu",)),),
)
published = publish(DECLARED)


def inputs():
    x, z, factor, dy, dv = (small_integers(3, 4, seed=s) for s in range(5))
    return x.requires_grad_(), z.requires_grad_(), factor, dy, dv


def call(path, *tensors):
    if path == "eager":
        return published(tensors, {})
    return torch.ops.rlk.linear_pair(*tensors, "auto")


@pytest.mark.parametrize("path", ["eager", "dispatcher"])
def test_derivatives_of_three_orders_equal_the_products_by_hand(path):
    x, z, factor, dy, dv = inputs()
    dy.requires_grad_()
    y, v = call(path, x, z, factor)
    dx, dz = torch.autograd.grad((y, v), (x, z), (dy, dv), create_graph=True)
    assert_same_bits(dx.detach(), (dy * factor).detach(), "dx")
    assert_same_bits(dz.detach(), dv * factor.flip(-1), "dz")
    ddx = small_integers(3, 4, seed=7).requires_grad_()
    (second,) = torch.autograd.grad(dx, dy, ddx, create_graph=True)
    assert_same_bits(second.detach(), (ddx * factor).detach(), "second")
    (third,) = torch.autograd.grad(second, ddx, dy)
    assert_same_bits(third, (dy * factor).detach(), "third")


def test_gradient_of_one_input_alone_asks_the_backend_for_no_other():
    x, z, factor, dy, _ = inputs()
    asked.clear()
    y, _ = published((x, z.detach(), factor), {})
    (dx,) = torch.autograd.grad(y, x, dy)
    assert asked == [frozenset({"x"})]
    assert_same_bits(dx, dy * factor, "dx")


def test_gradient_without_a_path_to_an_output_is_zero():
    x, z, factor, dy, _ = inputs()
    y, _ = published((x, z, factor), {})
    dx, dz = torch.autograd.grad(y, (x, z), dy)
    assert_same_bits(dx, dy * factor, "dx")
    assert_same_bits(dz.abs(), torch.zeros(3, 4), "dz")


def test_second_derivative_launches_the_forward_kernel_again():
    x, z, factor, dy, dv = inputs()
    dy.requires_grad_()
    (dx,) = torch.autograd.grad(call("eager", x, z, factor)[0], x, dy, create_graph=True)
    with trace() as launches:
        torch.autograd.grad(dx, dy, dv)
    assert [(launch.kernel, launch.direction) for launch in launches] == [("turn", "forward")]


def test_input_of_a_differentiable_call_is_not_kept():
    x, z, factor, dy, dv = inputs()
    middle = x * torch.ones_like(x)
    alive = weakref.ref(middle)
    results = published((middle, z, factor), {})
    del middle
    gc.collect()
    assert alive() is None
    torch.autograd.grad(results, (x, z), (dy, dv))


@pytest.mark.parametrize(
    "changes",
    [
        {"outputs": DECLARED.outputs[:1]},
        {"outputs": (Tensor("y", ("...",), ("=x",)), DECLARED.outputs[1])},
        {"outputs": (Tensor("y", ROW, ("float32",)), DECLARED.outputs[1])},
        {"saved": (Tensor("rest", ROW, ("=x",)),)},
        {"inputs": DECLARED.inputs[::-1]},
    ],
    ids=["fewer outputs", "shape", "dtype", "saved state", "order"],
)
def test_declaration_that_is_not_linear_is_refused(changes):
    with pytest.raises(RlkError, match="^linear_other: a linear operator must have outputs like"):
        publish(replace(DECLARED, name="linear_other", **changes))
