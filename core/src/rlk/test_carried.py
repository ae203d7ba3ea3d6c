# SPDX-License-Identifier: Apache-2.0
"""Calls with carriers: what torch knows, what is refused, and where a gradient goes."""

from types import SimpleNamespace

import pytest
import torch

from rlk.compare import assert_same_bits
from rlk.errors import ArgumentError, GradientError, RlkError
from rlk.exact_grad import new_carrier, state_of
from rlk.operator import Reduction, Tensor
from rlk.publish import publish
from rlk.reduce import exact_sum
from rlk.test_support import small_integers, tiny_operator

published = publish(tiny_operator("tiny_carried"))
two_results = publish(tiny_operator("tiny_carried_results", results=2))
OPS = torch.ops.rlk
SCALARS = {"factor": 0.5}


def inputs(rows=5, width=4):
    x, weight = small_integers(rows, width), small_integers(width, seed=1)
    return x.requires_grad_(), weight.requires_grad_()


def carried(x, weight, carrier):
    return published((x, weight), SCALARS, None, (carrier,))[0]


def weight_gradient(x, dy):
    """Sum over rows of dy * x * peak * factor, exact for small integers."""
    peak = x.detach().abs().amax(-1, keepdim=True)
    return (dy * x.detach() * peak * 0.5).sum(0)


def finished(carrier):
    return exact_sum.round(state_of(carrier), torch.float32)


def test_schema_of_the_carried_operator_is_derived_from_the_declaration():
    assert str(OPS.tiny_carried_carried.default._schema) == (
        "rlk::tiny_carried_carried(Tensor x, Tensor weight, Tensor? weight_sum, float factor,"
        " str backend) -> (Tensor y, Tensor peak)"
    )


def test_carrier_takes_the_state_and_the_parameter_zeros():
    x, weight = inputs()
    dy, carrier = small_integers(5, 4, seed=2), new_carrier(weight)
    y = carried(x, weight, carrier)
    assert_same_bits(y, published((x, weight), SCALARS)[0], "y")
    y.backward(dy)
    assert_same_bits(finished(carrier), weight_gradient(x, dy), "dweight")
    assert_same_bits(weight.grad, torch.zeros(4), "weight.grad")
    expected = torch.autograd.grad(published((x, weight), SCALARS)[0], x, dy)[0]
    assert_same_bits(x.grad, expected, "dx")


def test_carrier_of_several_calls_in_one_graph_adds_them():
    (x, weight), other = inputs(), small_integers(3, 4, seed=7)
    dy, dz, carrier = (
        small_integers(5, 4, seed=2),
        small_integers(3, 4, seed=3),
        new_carrier(weight),
    )
    loss = (carried(x, weight, carrier) * dy).sum() + (carried(other, weight, carrier) * dz).sum()
    loss.backward()
    expected = weight_gradient(x, dy) + weight_gradient(other, dz)
    assert_same_bits(finished(carrier), expected, "dweight")


def test_carrier_of_a_frozen_parameter_takes_the_state_alone():
    x, weight = inputs()
    carrier, dy = new_carrier(weight), small_integers(5, 4, seed=2)
    carried(x.detach(), weight.detach(), carrier).backward(dy)
    assert_same_bits(finished(carrier), weight_gradient(x, dy), "dweight")
    assert weight.grad is None


PARTS = {
    "inputs": lambda loss, x, weight: loss.backward(inputs=[weight]),
    "grad": lambda loss, x, weight: torch.autograd.grad(loss, [x, weight]),
    # Behind another node, which is no leaf.
    "doubled": lambda loss, x, weight: loss.backward(inputs=[x, weight]),
}


@pytest.mark.parametrize("part", PARTS)
def test_gradient_of_a_parameter_without_its_carrier_is_refused_instead_of_zeros(part):
    x, weight = inputs()
    given = weight * 2 if part == "doubled" else weight
    loss = carried(x, given, new_carrier(weight)).sum()
    with pytest.raises(GradientError) as caught:
        PARTS[part](loss, x, weight)
    assert str(caught.value) == (
        "tiny_carried: backward must run for all leaves where weight has a carrier, got one for "
        "weight alone, whose gradient is zeros; call backward() without inputs="
    )


def test_gradient_of_inputs_alone_leaves_carrier_and_parameter_as_they_are():
    x, weight = inputs()
    carrier, dy = new_carrier(weight), small_integers(5, 4, seed=2)
    expected = torch.autograd.grad(published((x, weight), SCALARS)[0], x, dy)[0]
    (dx,) = torch.autograd.grad(carried(x, weight, carrier), x, dy)
    assert_same_bits(dx, expected, "dx")
    assert weight.grad is None
    assert carrier.grad is None


def test_carrier_that_wants_no_gradient_leaves_the_parameter_its_own():
    x, weight = inputs()
    dy = small_integers(5, 4, seed=2)
    for carrier in (new_carrier(weight).detach(), None):
        for call in (carried, lambda *t: OPS.tiny_carried_carried(*t, 0.5, "auto")[0]):
            weight.grad = None
            call(x, weight, carrier).backward(dy)
            assert_same_bits(weight.grad, weight_gradient(x, dy), "dweight")


def test_carrier_beside_an_unused_output_takes_the_other_one():
    x, weight = inputs()
    dy, carrier = small_integers(5, 4, seed=2), new_carrier(weight)
    y, _ = two_results((x, weight), SCALARS, None, (carrier,))
    y.backward(dy)
    assert_same_bits(finished(carrier), weight_gradient(x, dy), "dweight")


def test_carrier_of_no_rows_holds_an_empty_sum():
    _, weight = inputs()
    carrier = new_carrier(weight)
    carried(torch.ones(0, 4), weight, carrier).sum().backward()
    assert_same_bits(finished(carrier), torch.zeros(4), "dweight")


def test_carrier_without_grad_mode_gives_the_outputs_alone():
    x, weight = inputs()
    expected = published((x, weight), SCALARS)[0].detach()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            y = carried(x, weight, new_carrier(weight))
            through = OPS.tiny_carried_carried(x, weight, new_carrier(weight), 0.5, "auto")[0]
        assert_same_bits(y, expected, "y")
        assert_same_bits(through, expected, "y")
        assert not y.requires_grad


def test_carrier_second_differentiation_is_refused():
    x, weight = inputs()
    carrier = new_carrier(weight)
    y = carried(x, weight, carrier)
    (state,) = torch.autograd.grad(y.sum(), carrier, create_graph=True)
    with pytest.raises(GradientError, match="tiny_carried: the derivative must be of first order"):
        state.sum().backward()


def transformed(function):
    def call(x, weight, carrier):
        function(lambda *t: carried(*t).sum())(x, weight, carrier)

    return call


REFUSED = {
    "weight_sum must be float64, got float32": lambda x, w, c: carried(x, w, c.float()),
    "weight_sum must be [13, 4], got [12, 4]": lambda x, w, c: carried(x, w, c[:12]),
    "weight_sum must be on cpu like weight, got meta": lambda x, w, c: carried(x, w, c.to("meta")),
    "weight must be [N] with N=4, got [3]": lambda x, w, c: carried(x, w[:3], c[:, :3]),
    "weight_sum must be a tensor or None, got float": lambda x, w, c: carried(x, w, 1.0),
    "carriers must be at most 1, got 2": lambda x, w, c: published((x, w), SCALARS, None, (c, c)),
    "the derivative must be taken by torch.autograd, got torch.func": transformed(torch.func.grad),
    "the batch must be leading axes, got torch.vmap": lambda x, w, c: torch.vmap(
        lambda row: carried(row, w, c)
    )(x),
}


@pytest.mark.parametrize("message", REFUSED)
def test_carried_call_that_cannot_be_served_is_refused(message):
    x, weight = inputs()
    with pytest.raises(RlkError) as caught:
        REFUSED[message](x, weight, new_carrier(weight))
    assert str(caught.value).startswith("tiny_carried")
    assert message in str(caught.value)


def test_carriers_of_an_operator_without_exact_parameters_are_refused():
    rows = Tensor("x", ("...", "N"), ("float32",), gradient="row")
    operator = tiny_operator(
        "tiny_carried_rows",
        inputs=(rows, Tensor("weight", ("N",), ("float32",))),
        reductions=(Reduction("dx", "row_sum", "N"),),
    )
    x, weight = inputs()
    with pytest.raises(RlkError, match="carriers must be at most 0, got 1"):
        publish(operator)((x, weight.detach()), SCALARS, None, (new_carrier(weight),))
    assert not hasattr(OPS, "tiny_carried_rows_carried")


@pytest.mark.parametrize(
    "carrier", [torch.zeros(12, 4, dtype=torch.float64), torch.zeros(13, 4), 0]
)
def test_state_of_what_is_no_carrier_is_refused(carrier):
    with pytest.raises(ArgumentError, match=r"state_of: carrier must be float64 \[13, ...\]"):
        state_of(carrier)


def test_new_carrier_of_no_tensor_is_refused():
    with pytest.raises(ArgumentError, match="new_carrier: parameter must be a tensor, got Simple"):
        new_carrier(SimpleNamespace())
