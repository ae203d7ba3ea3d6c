# SPDX-License-Identifier: Apache-2.0
"""The projection as a layer: what it computes, its state, and what it refuses."""

import copy

import pytest
import torch
from torch import nn

from rlk.compare import assert_same_bits
from rlk.errors import ArgumentError
from rlk_qwenimage import ModulationLinear, adaln_mod_projection


def normal(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(module, temb):
    """mod and the gradients of temb and the parameters, for a fixed upstream gradient."""
    temb = temb.detach().requires_grad_()
    mod = module(temb)
    leaves = [temb, *module.parameters()]
    return mod.detach(), *torch.autograd.grad(mod, leaves, normal(*mod.shape).to(mod))


def test_modulation_linear_returns_all_parts_in_the_order_of_the_operator():
    torch.manual_seed(5)
    layer = ModulationLinear(20, 6 * 4)
    temb = normal(3, 20)
    norm1, norm2 = adaln_mod_projection(temb, layer.weight, layer.bias, "img")
    assert_same_bits(layer(temb).detach(), torch.cat([*norm1, *norm2], -1).detach())
    assert list(layer.state_dict()) == list(nn.Linear(20, 24).state_dict())


def test_modulation_linear_without_bias_is_refused():
    with pytest.raises(ArgumentError) as caught:
        ModulationLinear(4, 6, bias=False)
    assert str(caught.value) == "ModulationLinear: bias must be True, got False"


@pytest.mark.parametrize(
    ("sizes", "named", "got"),
    [((-3, 6), "in_features", -3), ((3, 0), "out_features", 0), ((3, 6.0), "out_features", 6.0)],
)
def test_modulation_linear_of_an_impossible_size_is_refused(sizes, named, got):
    with pytest.raises(ArgumentError) as caught:
        ModulationLinear(*sizes)
    expected = f"ModulationLinear: {named} must be an integer of at least 1, got {got!r}"
    assert str(caught.value) == expected


@pytest.mark.parametrize("width", [1, 7])
def test_modulation_linear_of_any_width_is_a_linear_layer_of_the_silu(width):
    torch.manual_seed(5)
    layer, temb = ModulationLinear(20, width), normal(3, 20)
    exact = nn.functional.silu(temb.double()) @ layer.weight.double().t() + layer.bias.double()
    assert_same_bits(layer(temb).detach().bfloat16(), exact.float().detach().bfloat16())


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_modulation_linear_under_autocast_computes_as_a_copy_in_that_dtype(narrow):
    layer, temb = ModulationLinear(20, 24), normal(3, 20)
    expected = gradients(copy.deepcopy(layer).to(narrow), temb.to(narrow))
    with torch.autocast("cpu", narrow):
        found = gradients(layer, temb)
    for actual, wanted in zip(found, expected, strict=True):
        assert_same_bits(actual.to(narrow), wanted)
