# SPDX-License-Identifier: Apache-2.0
"""The gated norm of FLA, which some releases of transformers build in place of their own."""

import copy
import pickle
from importlib.util import find_spec

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from rlk.compare import assert_same_bits
from rlk.errors import ArgumentError
from rlk_qwen3next import Qwen3NextRMSNormGated, patch, unpatch

BUILDS_FLA = hasattr(theirs, "FusedRMSNormGated")
pytestmark = pytest.mark.skipif(
    not BUILDS_FLA and find_spec("fla") is None,
    reason="needs flash-linear-attention, which this transformers does not build on",
)


def fla_norm(width=32, **options):
    from fla.modules import FusedRMSNormGated

    norm = FusedRMSNormGated(width, **options)
    if norm.weight is not None:
        torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(6))
    return norm


def run(module, device="cpu"):
    """y, dx, dgate and dweight of fixed rows."""
    generator = torch.Generator().manual_seed(7)
    x, gate, dy = (torch.randn(5, 3, 32, generator=generator).to(device) for _ in range(3))
    leaves = [x.requires_grad_(), gate.requires_grad_(), module.weight]
    y = module(x, gate)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def assert_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert_same_bits(a, e)


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
def test_patch_norm_of_fla_computes_as_ours_with_its_constants(activation):
    norm = fla_norm(eps=0.25, activation=activation)
    ours = Qwen3NextRMSNormGated(32, eps=0.25, activation=activation)
    ours.load_state_dict(norm.state_dict(), strict=True)
    kind, weight = type(norm), norm.weight
    (site,) = patch(norm).changed
    assert (site.eps, site.activation, site.weight_offset) == (0.25, activation, 0.0)
    assert isinstance(norm, kind)
    assert list(norm.state_dict()) == ["weight"]
    assert_same(run(norm), run(ours))
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert_same(run(twin), run(ours))
    unpatch(norm)
    assert type(norm) is kind
    assert norm.weight is weight


def test_patch_norm_of_fla_inside_a_model_is_found(model):
    gated = model.model.layers[0].linear_attn
    gated.norm = fla_norm(16, eps=1e-3, activation="silu")
    report = patch(model)
    assert len(report.changed) == 14
    found = {site.path: (site.class_name, site.eps) for site in report.changed}
    assert found["model.layers.0.linear_attn.norm"] == ("FusedRMSNormGated", 1e-3)
    model(torch.arange(8)[None]).logits.sum().backward()
    assert gated.norm.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("argument", "value", "got"),
    [("residual", torch.zeros(5, 3, 32), "a tensor"), ("prenorm", True, "True")],
)
def test_patch_norm_of_fla_refuses_what_ours_does_not_compute(argument, value, got):
    norm = fla_norm()
    patch(norm)
    with pytest.raises(ArgumentError, match=rf"FusedRMSNormGated: {argument} must be .*got {got};"):
        norm(torch.ones(5, 3, 32), torch.ones(5, 3, 32), **{argument: value})


def test_patch_norm_of_fla_without_weight_is_left_alone():
    norm = fla_norm(elementwise_affine=False)
    kind = type(norm)
    (site,) = patch(norm).left
    assert site.reason == "it has no weight"
    assert type(norm) is kind


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
def test_patch_norm_of_fla_on_a_gpu_has_the_bits_of_the_cpu(activation):
    norm = fla_norm(activation=activation)
    twin = copy.deepcopy(norm).cuda()
    original = run(twin, "cuda")
    patch(norm), patch(twin)
    assert_same([t.cpu() for t in run(twin, "cuda")], run(norm))
    unpatch(twin)
    assert_same(run(twin, "cuda"), original)
