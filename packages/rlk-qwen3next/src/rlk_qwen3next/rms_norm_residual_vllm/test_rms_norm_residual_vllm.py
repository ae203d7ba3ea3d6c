# SPDX-License-Identifier: Apache-2.0
"""What is special to rms_norm_residual_vllm on a GPU; test_rms_norm_vllm.py judges its gate."""

import pytest
import torch

from rlk.compare import assert_same_bits
from rlk_qwen3next import RMSNorm, rms_norm
from rlk_qwen3next.rms_norm_residual_vllm import rollout
from rlk_qwen3next.rms_norm_vllm import rollout as plain


def test_inputs_are_those_of_the_plain_form_with_a_residual():
    sizes = {"T": 7, "N": 128}
    x, residual, weight = rollout.ENGINE.inputs(sizes)
    for actual, expected in zip(plain.ENGINE.inputs(sizes), (x, weight), strict=True):
        assert_same_bits(actual, expected)
    assert (residual.shape, residual.dtype) == (x.shape, torch.bfloat16)
    assert not torch.equal(residual, x)


def made(n):
    """x, residual and weight that want gradients, and an upstream one."""
    generator = torch.Generator("cuda").manual_seed(n)
    shapes = ((37, n), (37, n), (n,), (37, n))
    options = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    *leaves, dy = (torch.randn(*shape, **options) for shape in shapes)
    return *(leaf.requires_grad_() for leaf in leaves), dy


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("n", [96, 129, 256, 2048, 2056, 8200])
def test_bits_equal_a_rounded_sum_and_the_plain_norm_of_it(backend, n):
    x, residual, weight, dy = made(n)
    options = {"rounding": "vllm", "backend": backend}
    y, total = rms_norm(x, weight, residual=residual, **options)
    found = torch.autograd.grad(y, [x, residual, weight], dy)
    leaf = total.detach().requires_grad_()
    plain_y = rms_norm(leaf, weight, **options)
    expected = torch.autograd.grad(plain_y, [leaf, leaf, weight], dy)
    assert_same_bits(total.detach().cpu(), (x + residual).detach().cpu(), "residual_out")
    assert_same_bits(y.detach().cpu(), plain_y.detach().cpu(), "y")
    for name, a, e in zip(("dx", "dresidual", "dweight"), found, expected, strict=True):
        # Adding zeros turns -0 into +0.
        a, e = (torch.where(t == 0, 0.0, t).cpu() for t in (a, e))
        assert_same_bits(a, e, name)
    module = RMSNorm(n, rounding="vllm").cuda().bfloat16()
    with torch.no_grad():
        module.weight.copy_(weight)
    assert_same_bits(module(x, residual)[0].detach().cpu(), y.detach().cpu(), "module")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("missing", [0, 1])
def test_missing_output_gradient_counts_as_zeros_and_terms_share_one(backend, missing):
    *leaves, dy = made(264)
    x, residual, weight = leaves
    outputs = rms_norm(x, weight, residual=residual, rounding="vllm", backend=backend)
    zeros = [dy, dy]
    zeros[missing] = torch.zeros_like(dy)
    expected = torch.autograd.grad(outputs, leaves, zeros, retain_graph=True)
    found = torch.autograd.grad(outputs[1 - missing], leaves, dy)
    for name, actual, wanted in zip(("dx", "dresidual", "dweight"), found, expected, strict=True):
        assert_same_bits(actual, wanted, name)
    assert found[0].data_ptr() == found[1].data_ptr()
