# SPDX-License-Identifier: Apache-2.0
"""First-order gradients wherever autograd asks for them, and a clear refusal beyond."""

from itertools import combinations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rlk import trace, use_backend
from rlk.compare import assert_same_bits
from rlk.errors import ArgumentError, GradientError

ONCE = (
    "{}: the derivative must be of first order, got a second differentiation; "
    "detach the first gradient"
)


def leaves_of(batch):
    return {name: tensor.detach().requires_grad_() for name, tensor in batch.inputs.items()}


def expected_run(norm, backend, **options):
    batch = norm.batch(**options)
    return batch, norm.run(batch.inputs, batch.upstream["y"], backend)


def test_gradients_of_any_subset_are_those_of_all_together(norm, backend):
    batch, expected = expected_run(norm, backend)
    names = list(batch.inputs)
    for size in range(1, len(names) + 1):
        for wanted in combinations(names, size):
            run = norm.run(batch.inputs, batch.upstream["y"], backend, wanted=wanted)
            for name, tensor in run.items():
                assert_same_bits(tensor, expected[name], f"{name}, wanted {wanted}")


def test_backward_operator_returns_only_what_is_needed(norm, backend):
    batch = norm.batch()
    _, rstd = norm.forward(batch, backend)
    whole = norm.backward(batch, rstd, backend)
    for position, name in enumerate(batch.inputs):
        results = norm.backward(batch, rstd, backend, needs=[name])
        assert_same_bits(results[position], whole[position], name)
        others = [t.shape for other, t in enumerate(results) if other != position]
        assert others == [(0,)] * len(others)


@pytest.mark.parametrize(("change", "got"), [(lambda r: r[:1], "[1]"), (torch.Tensor.double, "")])
def test_backward_saved_state_that_does_not_fit_is_refused(norm, backend, change, got):
    batch = norm.batch()
    _, rstd = norm.forward(batch, backend)
    with pytest.raises(ArgumentError, match="rstd must be ") as caught:
        norm.backward(batch, change(rstd), backend)
    assert str(caught.value).endswith(f"got {got or 'float64'}")


def test_backend_computes_only_what_is_needed(norm, backend):
    batch = norm.batch()
    _, rstd = norm.forward(batch, backend)
    module = norm.operator.backend(backend).load()
    tensors = (*batch.upstream.values(), *batch.inputs.values(), rstd)
    for name in batch.inputs:
        results = module.backward(*tensors, needs=frozenset([name]), **batch.scalars)
        computed = [n for n, r in zip(batch.inputs, results, strict=True) if r is not None]
        assert computed == [name]


def test_frozen_weight_is_neither_summed_nor_rounded(norm, backend):
    batch = norm.batch()
    with trace() as launches:
        norm.run(batch.inputs, batch.upstream["y"], backend, wanted=["x"])
    assert [launch.direction for launch in launches] == ["forward", "backward"]
    with trace() as launches:
        norm.run(batch.inputs, batch.upstream["y"], backend, wanted=["weight"])
    assert [launch.direction for launch in launches][2:] == ["backward", "backward"]


def test_backward_that_nobody_needs_launches_nothing(norm, backend):
    batch = norm.batch()
    _, rstd = norm.forward(batch, backend)
    with trace() as launches:
        norm.backward(batch, rstd, backend, needs=[])
    assert launches == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_y_without_gradients_has_the_same_bits(norm, backend, mode):
    batch, expected = expected_run(norm, backend)
    with mode():
        y = norm.call(leaves_of(batch).values(), backend)
    assert not y.requires_grad
    assert_same_bits(y, expected["y"], "y")


def test_y_under_autocast_keeps_its_dtype_and_bits(norm, backend):
    batch = norm.batch("float32")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = norm.call(batch.inputs.values(), backend)
    assert_same_bits(y, norm.call(batch.inputs.values(), backend), "y")


def test_graph_used_twice_adds_its_gradients(norm, backend):
    batch, expected = expected_run(norm, backend)
    leaves = leaves_of(batch)
    y = norm.call(leaves.values(), backend)
    y.backward(batch.upstream["y"], retain_graph=True)
    y.backward(batch.upstream["y"])
    for name, leaf in leaves.items():
        assert_same_bits(leaf.grad, expected[f"d{name}"] * 2, name)


def test_operator_used_twice_on_one_input_adds_its_gradients(norm, backend):
    batch, expected = expected_run(norm, backend)
    leaves = leaves_of(batch)
    y = norm.call(leaves.values(), backend) + norm.call(leaves.values(), backend)
    y.backward(batch.upstream["y"])
    for name, leaf in leaves.items():
        assert_same_bits(leaf.grad, expected[f"d{name}"] * 2, name)


def test_operator_on_its_own_output_follows_the_chain_rule(rms_norm, backend):
    batch, first = expected_run(rms_norm, backend)
    x, weight = leaves_of(batch).values()
    y = rms_norm.call([rms_norm.call([x, weight], backend), weight.detach()], backend)
    y.backward(batch.upstream["y"])
    second = rms_norm.run({**batch.inputs, "x": first["y"]}, batch.upstream["y"], backend)
    expected = rms_norm.run(batch.inputs, second["dx"], backend)
    assert_same_bits(x.grad, expected["dx"], "dx")
    assert_same_bits(weight.grad, expected["dweight"], "dweight")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_call_has_the_same_bits(norm, backend, reentrant):
    batch, expected = expected_run(norm, backend)
    leaves = leaves_of(batch)
    y = checkpoint(
        lambda *tensors: norm.call(tensors, backend), *leaves.values(), use_reentrant=reentrant
    )
    y.backward(batch.upstream["y"])
    for name, leaf in leaves.items():
        assert_same_bits(leaf.grad, expected[f"d{name}"], name)


def test_backend_of_the_forward_serves_the_backward_outside_its_block(norm, backend):
    batch, _ = expected_run(norm, backend)
    with use_backend(backend):
        y = norm.call(leaves_of(batch).values())
    with trace() as launches:
        y.backward(batch.upstream["y"])
    assert {launch.backend for launch in launches} == {backend}


def test_input_changed_between_the_passes_is_refused_by_torch(norm, backend):
    batch = norm.batch()
    leaves = leaves_of(batch)
    y = norm.call(leaves.values(), backend)
    with torch.no_grad():
        leaves["x"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(batch.upstream["y"])


def first_gradients(norm, backend):
    """Leaves with dy among them, and first gradients that keep their graph."""
    batch, expected = expected_run(norm, backend)
    leaves = leaves_of(batch)
    dy = batch.upstream["y"].requires_grad_()
    y = norm.call(leaves.values(), backend)
    gradients = torch.autograd.grad(y, list(leaves.values()), dy, create_graph=True)
    return {**leaves, "dy": dy}, gradients, expected


def test_create_graph_first_order_use_has_the_same_bits(norm, backend):
    leaves, gradients, expected = first_gradients(norm, backend)
    for name, gradient in zip(leaves, gradients, strict=False):
        assert_same_bits(gradient.detach(), expected[f"d{name}"], name)
    # As a gradient norm is logged, or a penalty on the detached gradient.
    (sum(g.detach().square().sum() for g in gradients) * leaves["x"].sum()).backward()
    assert leaves["x"].grad.count_nonzero() == leaves["x"].numel()


def test_second_differentiation_raises_for_every_pair(norm, backend):
    leaves, gradients, _ = first_gradients(norm, backend)
    for gradient in gradients:
        for leaf in leaves.values():
            with pytest.raises(GradientError) as caught:
                torch.autograd.grad(gradient.sum(), leaf, retain_graph=True)
            assert str(caught.value) == ONCE.format(norm.name)


def test_gradient_penalty_raises_instead_of_counting_as_constant(norm, backend):
    leaves, gradients, _ = first_gradients(norm, backend)
    loss = leaves["weight"].sum() + gradients[0].square().sum()
    with pytest.raises(GradientError) as caught:
        loss.backward()
    assert str(caught.value) == ONCE.format(norm.name)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_mode_is_refused_instead_of_dropped(norm, backend):
    batch = norm.batch()
    tensors = list(batch.inputs.values())
    tangents = [torch.ones_like(t) for t in tensors]
    with torch.autograd.forward_ad.dual_level():
        duals = map(torch.autograd.forward_ad.make_dual, tensors, tangents)
        with pytest.raises(GradientError, match=f"{norm.name}: .* got forward mode"):
            norm.call(list(duals), backend)
