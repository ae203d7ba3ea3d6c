# SPDX-License-Identifier: Apache-2.0
"""The modules: their state, their copies, and what they refuse."""

import pytest
import torch

from rlk.compare import assert_same_bits
from rlk.errors import ArgumentError
from rlk.test_support.patched_models import DUPLICATES
from rlk_qwen3next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated, RMSNorm

N = 129
MODULES = [RMSNorm, Qwen3NextRMSNorm, Qwen3NextRMSNormGated]


@pytest.fixture(params=MODULES, ids=lambda m: m.__name__)
def module(request):
    module = request.param(N, eps=1e-5)
    torch.nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(4))
    return module


@pytest.mark.parametrize("size", [-1, 0, 2048.5, "64", True, None, [64]])
@pytest.mark.parametrize(
    ("cls", "name"),
    [(RMSNorm, "hidden_size"), (Qwen3NextRMSNorm, "dim"), (Qwen3NextRMSNormGated, "hidden_size")],
)
def test_module_of_an_impossible_size_is_refused_in_one_sentence(cls, name, size):
    with pytest.raises(ArgumentError) as caught:
        cls(size)
    expected = f"{cls.__name__}: {name} must be an integer of at least 1, got {size!r}"
    assert str(caught.value) == expected


def gradients(module):
    """y, dweight and dx of fixed rows."""
    generator = torch.Generator().manual_seed(5)
    count = 2 if isinstance(module, Qwen3NextRMSNormGated) else 1
    rows = [torch.randn(3, N, generator=generator).requires_grad_() for _ in range(count)]
    y = module(*rows)
    dy = torch.randn(3, N, generator=generator)
    return y.detach(), *torch.autograd.grad(y, [module.weight, *rows], dy)


@DUPLICATES
def test_module_copy_has_the_same_bits_and_its_own_weight(module, duplicate):
    twin = duplicate(module)
    for actual, expected in zip(gradients(twin), gradients(module), strict=True):
        assert_same_bits(actual, expected)
    before = module.weight.detach().clone()
    with torch.no_grad():
        twin.weight.zero_()
    assert_same_bits(module.weight.detach(), before, "weight")


def test_module_state_is_the_weight_alone_and_loads_strictly(module):
    assert list(module.state_dict()) == ["weight"]
    fresh = type(module)(N, eps=1e-5)
    fresh.load_state_dict(module.state_dict(), strict=True)
    for actual, expected in zip(gradients(fresh), gradients(module), strict=True):
        assert_same_bits(actual, expected)
    with pytest.raises(RuntimeError, match="bias"):
        fresh.load_state_dict({**module.state_dict(), "bias": torch.zeros(N)}, strict=True)


def test_module_eps_and_width_are_shown_and_used(module):
    assert repr(module).startswith(f"{type(module).__name__}(({N},), eps=1e-05")
    other = type(module)(N, eps=1.0)
    other.load_state_dict(module.state_dict())
    y, *_ = gradients(other)
    assert not torch.equal(y, gradients(module)[0])


def test_module_moved_to_a_narrow_dtype_computes_in_it(module):
    module = module.to(torch.bfloat16)
    count = 2 if isinstance(module, Qwen3NextRMSNormGated) else 1
    rows = [torch.randn(3, N, dtype=torch.bfloat16, requires_grad=True) for _ in range(count)]
    y = module(*rows)
    y.sum().backward()
    assert {t.dtype for t in (y, module.weight.grad, rows[0].grad)} == {torch.bfloat16}


def test_module_fp32_weight_with_narrow_rows_keeps_its_gradient_in_fp32(module):
    count = 2 if isinstance(module, Qwen3NextRMSNormGated) else 1
    rows = [torch.randn(3, N).bfloat16() for _ in range(count)]
    y = module(*rows)
    y.sum().backward()
    assert (y.dtype, module.weight.grad.dtype) == (torch.bfloat16, torch.float32)
    # Not a BF16 gradient in a wider coat.
    rounded = module.weight.grad.bfloat16().float()
    assert (rounded != module.weight.grad).sum() > N // 2


def test_gated_module_weight_is_built_where_and_as_asked():
    module = Qwen3NextRMSNormGated(8, device="meta", dtype=torch.float16)
    assert (module.weight.device.type, module.weight.dtype) == ("meta", torch.float16)


@pytest.mark.parametrize(
    ("eps", "complaint"),
    [(-1.0, "a finite float32 of at least 0.0, got -1.0"), (True, "a number, got True")],
)
@pytest.mark.parametrize(
    ("build", "name"),
    [(RMSNorm, "rms_norm"), (Qwen3NextRMSNorm, "qwen3_next_rms_norm"),
     (Qwen3NextRMSNormGated, "rms_norm_gated")],
)  # fmt: skip
def test_module_wrong_eps_is_refused_when_it_is_built(build, name, eps, complaint):
    with pytest.raises(ArgumentError) as caught:
        build(8, eps=eps)
    assert str(caught.value) == f"{name}: eps must be {complaint}"
