# SPDX-License-Identifier: Apache-2.0
"""Gradients are of first order and reverse mode; whatever else is asked for raises."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import rlk
from rlk.compare import assert_same_bits
from rlk.errors import GradientError
from rlk.operator import Backend
from rlk.publish import publish
from rlk.test_support import small_integers, tiny_backend, tiny_operator

golden = tiny_backend()
published = publish(
    tiny_operator("tiny_autograd", backends=(Backend("golden", lambda: golden, ("cpu",)),))
)
two_outputs = publish(tiny_operator("tiny_autograd_two", results=2))
OP = torch.ops.rlk.tiny_autograd
SECOND = (
    "tiny_autograd: the derivative must be of first order, got a second differentiation; "
    "detach the first gradient"
)


def eager(x, weight):
    """y on the short path."""
    return published((x, weight), {"factor": 1.0})[0]


def dispatched(x, weight):
    """y through the dispatcher."""
    return OP(x, weight, 1.0, "auto")[0]


every_path = pytest.mark.parametrize("call", [eager, dispatched])


def leaves(*shape, dtype=torch.float32):
    x = small_integers(*shape, dtype=dtype).requires_grad_()
    return x, small_integers(shape[-1], seed=1).requires_grad_()


def formula(x, weight):
    """y and z in FP64, exact for small integers."""
    x, weight = x.double(), weight.double()
    return x * x.detach().abs().amax(-1, keepdim=True) * weight, x


def oracle(x, weight, *upstream):
    """(dx, dweight) by autograd in FP64."""
    double = [t.detach().double().requires_grad_() for t in (x, weight)]
    outputs = formula(*double)[: len(upstream)]
    gradients = torch.autograd.grad(outputs, double, [dy.double() for dy in upstream])
    return [g.to(t.dtype) for g, t in zip(gradients, (x, weight), strict=True)]


UPSTREAM = {
    "contiguous": lambda t: t,
    "of a sum": lambda t: torch.ones(()).expand_as(t),
    "of a transpose": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "of a slice": lambda t: torch.stack([t, t], -1)[..., 0],
}


@every_path
@pytest.mark.parametrize("layout", UPSTREAM)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4,), (5, 4), (2, 3, 4), (2, 0, 4)], ids=str)
def test_gradients_any_upstream_equal_autograd_of_the_formula(call, layout, dtype, shape):
    x, weight = leaves(*shape, dtype=dtype)
    upstream = UPSTREAM[layout](small_integers(*shape, dtype=dtype, seed=2)).to(dtype)
    gradients = torch.autograd.grad(call(x, weight), (x, weight), upstream)
    for name, got, want in zip("xw", gradients, oracle(x, weight, upstream), strict=True):
        assert_same_bits(got, want, f"d{name}")
        assert got.is_contiguous()


@every_path
@pytest.mark.parametrize("wanted", [{"x"}, {"weight"}, {"x", "weight"}], ids=sorted)
def test_backward_asks_the_backend_for_needed_gradients_alone(call, wanted):
    x, weight = leaves(2, 4)
    x.requires_grad_("x" in wanted)
    weight.requires_grad_("weight" in wanted)
    golden.needs.clear()
    call(x, weight).sum().backward()
    assert golden.needs == [frozenset(wanted)]
    assert {n for n, t in {"x": x, "weight": weight}.items() if t.grad is not None} == wanted


@every_path
def test_forward_without_gradients_launches_no_backward(call):
    x, weight = leaves(2, 4)
    bystander = torch.ones((), requires_grad=True)
    with rlk.trace() as launches:
        with torch.no_grad():
            assert not call(x, weight).requires_grad
        y = call(x.detach(), weight.detach())
        assert not y.requires_grad
        (y.sum() * bystander).backward()
    assert [launch.direction for launch in launches] == ["forward", "forward"]


@pytest.mark.parametrize("present", ["y", "z", "both"])
def test_backward_missing_output_gradient_counts_as_zero(present):
    x, weight = leaves(2, 3, 4)
    y, z = two_outputs((x, weight), {"factor": 1.0})
    upstream = [small_integers(2, 3, 4, seed=2), small_integers(2, 3, 4, seed=3)]
    used = {"y": [0], "z": [1], "both": [0, 1]}[present]
    outputs = [(y, z)[i] for i in used]
    gradients = torch.autograd.grad(outputs, (x, weight), [upstream[i] for i in used])
    filled = [g if i in used else torch.zeros_like(g) for i, g in enumerate(upstream)]
    for got, want in zip(gradients, oracle(x, weight, *filled), strict=True):
        assert_same_bits(got, want)


@every_path
def test_output_may_be_written_into_before_backward(call):
    x, weight = leaves(2, 3, 4)
    y = call(x, weight)
    y.mul_(3)
    y.sum().backward()
    want = oracle(x, weight, torch.full((2, 3, 4), 3.0))
    assert_same_bits(x.grad, want[0])
    assert_same_bits(weight.grad, want[1])


@every_path
def test_input_written_into_before_backward_is_refused(call):
    x, weight = leaves(2, 4)
    y = call(x, weight)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@every_path
def test_backward_twice_over_a_retained_graph_repeats_bits(call):
    x, weight = leaves(2, 4)
    loss = call(x, weight).sum()
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (x, weight))
    for got, want in zip(second, first, strict=True):
        assert_same_bits(got, want)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@every_path
def test_backward_of_a_checkpoint_equals_the_plain_one(call):
    x, weight = leaves(2, 4)
    with rlk.use_backend("golden"):
        checkpoint(call, x, weight, use_reentrant=False).sum().backward()
    for got, want in zip((x.grad, weight.grad), oracle(x, weight, torch.ones(2, 4)), strict=True):
        assert_same_bits(got, want)


@every_path
def test_create_graph_first_order_is_right_and_may_be_written_into(call):
    x, weight = leaves(2, 3, 4)
    wanted = oracle(x, weight, torch.ones(2, 3, 4))
    gradients = torch.autograd.grad(call(x, weight).sum(), (x, weight), create_graph=True)
    for got, want in zip(gradients, wanted, strict=True):
        assert_same_bits(got, want)
        assert got.requires_grad
        assert_same_bits(got.mul_(2), want * 2)


@every_path
@pytest.mark.parametrize("of", [0, 1], ids=["dx", "dweight"])
@pytest.mark.parametrize("by", [0, 1], ids=["x", "weight"])
def test_second_derivative_raises_instead_of_being_zero(call, of, by):
    tensors = leaves(2, 4)
    gradients = torch.autograd.grad(call(*tensors).sum(), tensors, create_graph=True)
    with pytest.raises(GradientError) as caught:
        torch.autograd.grad(gradients[of].sum(), tensors[by])
    assert str(caught.value) == SECOND


@every_path
def test_second_derivative_by_the_upstream_gradient_raises(call):
    x, weight = leaves(2, 4)
    upstream = torch.ones(2, 4, requires_grad=True)
    (dx,) = torch.autograd.grad(call(x, weight), x, upstream, create_graph=True)
    with pytest.raises(GradientError):
        torch.autograd.grad(dx.sum(), upstream)


def test_backward_operator_differentiated_directly_raises():
    x, weight = leaves(2, 4)
    _, peak = OP(x.detach(), weight.detach(), 1.0, "golden")
    arguments = (peak, 1.0, True, True, "golden")
    dx, state = torch.ops.rlk.tiny_autograd_backward(torch.ones(2, 4), x, weight, *arguments)
    assert (dx.requires_grad, state.requires_grad) == (True, False)
    assert_same_bits(dx.detach(), oracle(x, weight, torch.ones(2, 4))[0])
    with pytest.raises(GradientError) as caught:
        torch.autograd.grad(dx.sum(), weight)
    assert str(caught.value) == SECOND
    plain = (x.detach(), weight.detach())
    dx, _ = torch.ops.rlk.tiny_autograd_backward(torch.ones(2, 4), *plain, *arguments)
    assert not dx.requires_grad


@pytest.mark.parametrize("path", ["eager", "dispatched"])
def test_saved_state_of_a_differentiable_call_takes_no_gradient(path):
    x, weight = leaves(2, 3, 4)
    arguments = (x, weight, 1.0, "golden")
    y, peak = published.call(*arguments) if path == "eager" else OP(*arguments)
    assert (y.requires_grad, peak.requires_grad) == (True, False)
    assert_same_bits(peak, x.detach().abs().amax(-1))


def forward_mode(call, x, weight):
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(x, torch.ones_like(x)), weight)


@every_path
@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_mode_is_refused_instead_of_being_zero(call, requires_grad):
    x, weight = (t.detach().requires_grad_(requires_grad) for t in leaves(2, 4))
    message = (
        "tiny_autograd: the derivative must be of reverse mode, got forward mode; "
        "use torch.autograd.grad"
    )
    with pytest.raises(GradientError) as caught:
        forward_mode(call, x, weight)
    assert str(caught.value) == message
    with pytest.raises(GradientError) as caught:
        torch.func.jvp(lambda a: call(a, weight), (x,), (torch.ones_like(x),))
    assert str(caught.value) == message
    with forward_ad.dual_level():
        assert_same_bits(call(x, weight).detach(), formula(x, weight)[0].detach().float())


@every_path
@pytest.mark.parametrize("transform", ["grad", "vjp", "jacrev", "vmap of grad"])
def test_torch_func_derivative_is_refused_with_what_to_do(call, transform):
    x, weight = (t.detach() for t in leaves(2, 4))
    run = {
        "grad": lambda: torch.func.grad(lambda a: call(a, weight).sum())(x),
        "vjp": lambda: torch.func.vjp(lambda a: call(a, weight), x),
        "jacrev": lambda: torch.func.jacrev(lambda a: call(x, a))(weight),
        "vmap of grad": lambda: torch.vmap(torch.func.grad(lambda a: call(a, weight).sum()))(x),
    }[transform]
    with pytest.raises(GradientError) as caught:
        run()
    assert str(caught.value) == (
        "tiny_autograd: the derivative must be taken by torch.autograd, got torch.func; "
        "use torch.autograd.grad"
    )


@every_path
def test_torch_func_derivative_by_something_else_is_served(call):
    x, weight = (t.detach() for t in leaves(2, 4))
    derivative = torch.func.grad(lambda a: (call(x, weight) * a).sum())(torch.ones(()))
    assert derivative == formula(x, weight)[0].sum()


@every_path
def test_hessian_raises_instead_of_being_zero(call):
    x, weight = (t.detach() for t in leaves(2, 4))
    with pytest.raises(GradientError, match="second differentiation"):
        torch.autograd.functional.hessian(lambda a: call(a, weight).sum(), x)


@every_path
@pytest.mark.parametrize("batch", ["is_grads_batched", "vectorized jacobian"])
def test_batch_of_output_gradients_is_refused_with_what_to_do(call, batch):
    x, weight = leaves(2, 4)
    y = call(x, weight)
    run = {
        "is_grads_batched": lambda: torch.autograd.grad(
            y, (x, weight), torch.ones(3, *y.shape), is_grads_batched=True
        ),
        "vectorized jacobian": lambda: torch.autograd.functional.jacobian(
            lambda a: call(a, weight), x, vectorize=True
        ),
    }[batch]
    with pytest.raises(GradientError) as caught:
        run()
    assert str(caught.value) == (
        "tiny_autograd: the derivative must be of one output gradient at a time, got a batch of "
        "them; use is_grads_batched=False or vectorize=False"
    )
