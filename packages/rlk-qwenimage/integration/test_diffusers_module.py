# SPDX-License-Identifier: Apache-2.0
"""Our module stands in for the class of diffusers: same construction, state and values."""

import inspect

import pytest
import torch
from diffusers.models import normalization as theirs

import rlk_qwenimage as ours

DTYPES = (torch.float32, torch.bfloat16)


def pair(width=48, conditioning=40):
    """Our module and theirs with the same random weights, loaded strictly from ours to theirs."""
    torch.manual_seed(2026)
    mine = ours.AdaLayerNormContinuous(width, conditioning, elementwise_affine=False, eps=1e-6)
    other = theirs.AdaLayerNormContinuous(width, conditioning, elementwise_affine=False, eps=1e-6)
    other.load_state_dict(mine.state_dict(), strict=True)
    return mine, other


def inputs(dtype):
    """Tokens and conditioning of three samples, which require gradients."""
    shapes = ((3, 17, 48), (3, 40))
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def test_constructor_every_argument_of_theirs_has_its_name_place_and_default():
    mine, other = (
        [
            (a.name, a.default)
            for a in inspect.signature(m.AdaLayerNormContinuous).parameters.values()
        ]
        for m in (ours, theirs)
    )
    assert mine == other


def test_state_dict_strict_loading_works_both_ways():
    mine, other = pair()
    assert list(mine.state_dict()) == list(other.state_dict()) == ["linear.weight", "linear.bias"]
    fresh = ours.AdaLayerNormContinuous(48, 40, elementwise_affine=False)
    fresh.load_state_dict(other.state_dict(), strict=True)
    assert torch.equal(fresh.linear.weight, mine.linear.weight)
    assert [name for name, _ in mine.named_modules()] == [n for n, _ in other.named_modules()]


def test_initial_state_always_equals_theirs():
    states = []
    for library in (ours, theirs):
        torch.manual_seed(3)
        states.append(library.AdaLayerNormContinuous(8, 6, elementwise_affine=False).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_random_tokens_are_within_the_contract_of_theirs(close, dtype):
    mine, other = (module.to(dtype) for module in pair())
    tensors = inputs(dtype)
    result = mine(*tensors)
    assert result.dtype == dtype
    close(result, other(*tensors))


def test_forward_conditioning_in_fp32_is_taken_in_the_dtype_of_the_tokens(close):
    mine, other = (module.to(torch.bfloat16) for module in pair())
    x, temb = inputs(torch.bfloat16)
    result = mine(x, temb.float())
    assert result.dtype == torch.bfloat16
    close(result, other(x, temb.float()))


def test_gradients_random_tokens_are_within_the_contract_of_theirs(close):
    mine, other = pair()
    tensors = inputs(torch.float32)
    dy = torch.randn(3, 17, 48)
    actual = torch.autograd.grad(mine(*tensors), [*tensors, *mine.parameters()], dy)
    expected = torch.autograd.grad(other(*tensors), [*tensors, *other.parameters()], dy)
    for one, two in zip(actual, expected, strict=True):
        close(one, two, "gradient_accuracy")
