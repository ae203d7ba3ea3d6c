# SPDX-License-Identifier: Apache-2.0
"""The output norm as a module: what it computes, its state, and what it refuses."""

import copy
import pickle

import pytest
import torch

from rlk.compare import assert_same_bits
from rlk.errors import ArgumentError
from rlk_qwenimage import AdaLayerNormContinuous, final_adaln_out


def normal(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def output_norm():
    torch.manual_seed(5)
    return AdaLayerNormContinuous(24, 20, elementwise_affine=False, eps=1e-6)


def gradients(module, *inputs):
    """The output and the gradients of inputs and parameters, for a fixed upstream gradient."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    y = module(*leaves)
    return y.detach(), *torch.autograd.grad(y, [*leaves, *module.parameters()], normal(*y.shape))


@pytest.mark.parametrize(
    ("argument", "value", "wanted"),
    [
        ("elementwise_affine", True, "False"),
        ("bias", False, "True"),
        ("norm_type", "rms_norm", "'layer_norm'"),
    ],
)
def test_output_norm_refuses_what_the_operator_does_not_compute(argument, value, wanted):
    with pytest.raises(ArgumentError) as caught:
        AdaLayerNormContinuous(24, 20, **{"elementwise_affine": False, argument: value})
    expected = f"AdaLayerNormContinuous: {argument} must be {wanted}, got {value!r}"
    assert str(caught.value) == f"{expected}; pass {argument}={wanted}"


@pytest.mark.parametrize(
    ("sizes", "named", "got"),
    [((0, 20), "embedding_dim", 0), ((24, -2), "conditioning_embedding_dim", -2)],
)
def test_output_norm_of_an_impossible_size_is_refused(sizes, named, got):
    with pytest.raises(ArgumentError) as caught:
        AdaLayerNormContinuous(*sizes, elementwise_affine=False)
    expected = f"AdaLayerNormContinuous: {named} must be an integer of at least 1, got {got!r}"
    assert str(caught.value) == expected


@pytest.mark.parametrize("eps", [-1.0, float("nan"), float("inf")])
def test_output_norm_refuses_an_eps_that_the_operator_does_not_define(eps):
    with pytest.raises(ArgumentError, match="eps must be"):
        AdaLayerNormContinuous(24, 20, elementwise_affine=False, eps=eps)


def test_output_norm_computes_the_operator_with_its_own_eps(output_norm):
    output_norm.norm.eps = 0.5
    x, temb = normal(3, 7, 24), normal(3, 20, seed=2)
    linear = output_norm.linear
    expected = final_adaln_out(x, temb, linear.weight, linear.bias, 0.5)
    assert_same_bits(output_norm(x, temb).detach(), expected.detach())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_output_norm_copy_has_the_same_bits_and_its_own_weight(output_norm, duplicate):
    inputs = normal(3, 7, 24), normal(3, 20, seed=2)
    expected = gradients(output_norm, *inputs)
    twin = duplicate(output_norm)
    for actual, wanted in zip(gradients(twin, *inputs), expected, strict=True):
        assert_same_bits(actual, wanted)
    with torch.no_grad():
        twin.linear.weight.zero_()
    assert output_norm.linear.weight.abs().sum() > 0


def test_output_norm_state_is_the_projection_alone(output_norm):
    assert list(output_norm.state_dict()) == ["linear.weight", "linear.bias"]
    assert [p.shape for p in output_norm.parameters()] == [(48, 20), (48,)]


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_output_norm_under_autocast_computes_as_a_copy_in_that_dtype(output_norm, narrow):
    inputs = normal(3, 7, 24), normal(3, 20, seed=2)
    twin = copy.deepcopy(output_norm).to(narrow)
    expected = gradients(twin, *(tensor.to(narrow) for tensor in inputs))
    with torch.autocast("cpu", narrow):
        found = gradients(output_norm, *inputs)
    for actual, wanted in zip(found, expected, strict=True):
        assert_same_bits(actual.to(narrow), wanted)


def test_output_norm_with_another_layer_than_a_linear_one_is_refused(output_norm):
    output_norm.linear = torch.nn.Identity()
    with pytest.raises(ArgumentError) as caught:
        output_norm(normal(3, 7, 24), normal(3, 20))
    assert str(caught.value) == (
        "AdaLayerNormContinuous: linear must be a torch.nn.Linear, got Identity; unpatch the model "
        "before replacing its layers"
    )
