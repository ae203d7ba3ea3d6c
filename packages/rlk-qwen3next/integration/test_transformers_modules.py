# SPDX-License-Identifier: Apache-2.0
"""Our modules stand in for the classes of transformers: same construction, state and values."""

import inspect

import pytest
import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

import rlk_qwen3next as ours
from rlk.contract import load

NAMES = ("Qwen3NextRMSNorm", "Qwen3NextRMSNormGated")
DTYPES = (torch.float32, torch.bfloat16)


def pair(name, width=128):
    """Our module and theirs with one random weight, loaded strictly from ours to theirs."""
    torch.manual_seed(2026)
    mine, other = getattr(ours, name)(width, eps=1e-6), getattr(theirs, name)(width, eps=1e-6)
    torch.nn.init.normal_(mine.weight)
    other.load_state_dict(mine.state_dict(), strict=True)
    return mine, other


def inputs(name, dtype, width=128):
    """Rows, and gates where the module takes them; leaves that require gradients."""
    count = 2 if name.endswith("Gated") else 1
    return [torch.randn(3, 59, width, dtype=dtype).requires_grad_() for _ in range(count)]


def assert_within(judgment, actual, expected):
    """Element by element within the contract's public ceiling of a reduction."""
    bound = load().tolerance(judgment, "reduction", expected.dtype)
    torch.testing.assert_close(actual, expected, atol=bound.atol, rtol=bound.rtol)


@pytest.mark.parametrize("name", NAMES)
def test_constructor_every_argument_of_theirs_is_accepted(name):
    mine = inspect.signature(getattr(ours, name)).parameters
    for argument in inspect.signature(getattr(theirs, name)).parameters.values():
        if argument.kind is not inspect.Parameter.VAR_KEYWORD:
            assert mine[argument.name].default == argument.default
    assert repr(getattr(ours, name)(8)).startswith(name)


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_strict_loading_works_both_ways(name):
    mine, other = pair(name)
    assert list(mine.state_dict()) == list(other.state_dict())
    fresh = getattr(ours, name)(128)
    fresh.load_state_dict(other.state_dict(), strict=True)
    assert torch.equal(fresh.weight, mine.weight)


@pytest.mark.parametrize("name", NAMES)
def test_initial_weight_always_equals_theirs(name):
    assert torch.equal(getattr(ours, name)(8).weight, getattr(theirs, name)(8).weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_forward_random_rows_is_within_the_contract_of_theirs(name, dtype):
    mine, other = (module.to(dtype) for module in pair(name))
    tensors = inputs(name, dtype)
    result = mine(*tensors)
    assert result.dtype == dtype
    assert_within("forward_accuracy", result, other(*tensors))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_random_rows_are_within_the_contract_of_theirs(name):
    mine, other = pair(name)
    tensors = inputs(name, torch.float32)
    dy = torch.randn_like(tensors[0])
    actual = torch.autograd.grad(mine(*tensors), [*tensors, mine.weight], dy)
    expected = torch.autograd.grad(other(*tensors), [*tensors, other.weight], dy)
    for one, two in zip(actual, expected, strict=True):
        assert_within("gradient_accuracy", one, two)


def test_model_with_every_norm_replaced_loads_its_own_checkpoint():
    config = Qwen3NextConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config).eval()
    state = model.state_dict()
    replaced = 0
    for path, module in list(model.named_modules()):
        name = type(module).__name__
        if name in NAMES:
            eps = module.variance_epsilon if name.endswith("Gated") else module.eps
            parent, _, attribute = path.rpartition(".")
            new = getattr(ours, name)(module.weight.shape[0], eps=eps)
            setattr(model.get_submodule(parent), attribute, new)
            replaced += 1
    # Four layers with two norms each, three with a gated one, one with q and k norms; the last.
    assert replaced == 4 * 2 + 3 + 2 + 1
    model.load_state_dict(state, strict=True)
    with torch.no_grad():
        logits = model(torch.arange(8)[None]).logits
    assert logits.isfinite().all()
