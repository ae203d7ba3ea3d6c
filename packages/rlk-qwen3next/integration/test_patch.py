# SPDX-License-Identifier: Apache-2.0
"""Patching a model of transformers and taking it back: what changes, and all that does not."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

import rlk
from rlk.compare import assert_same_bits, same_bits
from rlk.contract import load
from rlk.errors import ArgumentError
from rlk_qwen3next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated, patch, unpatch
from rlk_qwen3next.patching import sites

ROOT = Path(__file__).resolve().parents[3]
# Four layers with two norms each, three with a gated one, one with q and k norms; the last.
SITES = 4 * 2 + 3 + 2 + 1
CLASSES = (theirs.Qwen3NextRMSNorm, theirs.Qwen3NextRMSNormGated)


def norms(model):
    return {path: m for path, m in model.named_modules() if isinstance(m, CLASSES)}


def assert_same_results(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_same_bits(actual[name], expected[name], name)


def by_hand(module):
    """Our module with the weight and the constants of theirs."""
    gated = isinstance(module, theirs.Qwen3NextRMSNormGated)
    kind = Qwen3NextRMSNormGated if gated else Qwen3NextRMSNorm
    eps = module.variance_epsilon if gated else module.eps
    ours = kind(module.weight.shape[0], eps=eps)
    ours.weight = module.weight
    return ours


@pytest.mark.parametrize("autocast", [False, True])
def test_patch_every_site_computes_what_our_module_computes(model, results, autocast):
    patch(model)
    calls = []
    for path, module in norms(model).items():
        module.register_forward_hook(lambda m, x, y, path=path: calls.append((path, m, x, y)))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), rlk.trace() as launches:
        results(model)
    assert {path for path, *_ in calls} == set(norms(model))
    assert len([launch for launch in launches if launch.direction == "forward"]) == SITES
    for path, module, inputs, output in calls:
        assert_same_bits(output, by_hand(module)(*inputs), path)


def test_patch_model_output_is_no_longer_theirs_in_every_bit(model, results):
    before = results(model)
    patch(model)
    after = results(model)
    assert after.keys() == before.keys()
    assert not same_bits(after["logits"], before["logits"])
    torch.testing.assert_close(after["logits"], before["logits"], **tolerance())


def tolerance():
    bound = load().tolerance("forward_accuracy", "reduction", torch.float32)
    return {"atol": bound.atol, "rtol": bound.rtol}


def test_patch_unpatch_and_patch_again_return_the_same_bytes(model, results):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    classes = {path: type(module) for path, module in model.named_modules()}
    original = results(model)
    patch(model)
    patched = results(model)
    unpatch(model)
    assert {path: type(module) for path, module in model.named_modules()} == classes
    assert_same_results(results(model), original)
    patch(model)
    assert_same_results(results(model), patched)
    assert_same_results(model.state_dict(), state)


def test_patch_report_names_every_site_with_its_constants(model):
    model.model.layers[0].input_layernorm.eps = 0.5
    report = patch(model)
    assert (len(report.changed), report.left) == (SITES, ())
    assert {site.path for site in report.changed} == set(norms(model))
    by_path = {site.path: site for site in report.changed}
    assert dataclasses.astuple(by_path["model.layers.0.linear_attn.norm"]) == (
        "model.layers.0.linear_attn.norm", "Qwen3NextRMSNormGated", "rms_norm_gated",
        1e-5, "silu", 0.0, "",
    )  # fmt: skip
    assert dataclasses.astuple(by_path["model.layers.0.input_layernorm"]) == (
        "model.layers.0.input_layernorm", "Qwen3NextRMSNorm", "qwen3_next_rms_norm",
        0.5, None, 1.0, "",
    )  # fmt: skip
    header, *rows, last = str(report).splitlines()
    assert header.split() == ["site", "class", "operator", "eps", "activation", "offset"]
    assert last == f"{SITES} patched, 0 left alone"
    assert rows[0].split() == [
        "model.layers.0.linear_attn.norm", "Qwen3NextRMSNormGated", "rms_norm_gated",
        "1e-05", "silu", "0.0", "patched",
    ]  # fmt: skip
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.changed = ()


def test_patch_twice_changes_nothing_and_says_so(model):
    patch(model)
    classes = {path: type(module) for path, module in model.named_modules()}
    report = patch(model)
    assert report.changed == ()
    assert {site.reason for site in report.left} == {"it is patched already"}
    assert {path: type(module) for path, module in model.named_modules()} == classes
    unpatch(model)
    report = unpatch(model)
    assert report.changed == ()
    assert {site.reason for site in report.left} == {"it is not patched"}


def test_patch_eps_of_each_module_is_the_one_computed_with(model):
    first, second = model.model.layers[0].input_layernorm, model.model.layers[1].input_layernorm
    first.eps, second.eps = 0.5, 2.0
    patch(model)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    for module in (first, second):
        oracle = x.double() / torch.sqrt(x.double().square().mean(-1, keepdim=True) + module.eps)
        oracle = (oracle * (1 + module.weight.double())).float()
        torch.testing.assert_close(module(x), oracle, **tolerance())


def test_patch_sites_that_cannot_be_computed_are_left_alone_with_the_reason(model):
    class Derived(theirs.Qwen3NextRMSNorm):
        def _norm(self, x):
            return 2 * super()._norm(x)

    layers = model.model.layers
    layers[0].input_layernorm.__class__ = Derived
    layers[1].input_layernorm.eps = -1.0
    layers[2].input_layernorm.forward = lambda x: x
    layers[2].post_attention_layernorm.bias = torch.nn.Parameter(torch.zeros(64))
    layers[0].linear_attn.norm.activation = "gelu"
    del layers[1].post_attention_layernorm.eps
    model.extra = torch.nn.LayerNorm(4)
    before = {path: type(module) for path, module in model.named_modules()}
    report = patch(model)
    reasons = {site.path: site.reason for site in report.left}
    assert reasons == {
        "model.layers.0.input_layernorm": "its class is derived from Qwen3NextRMSNorm",
        "model.layers.1.input_layernorm": "qwen3_next_rms_norm: eps must be a finite float32 of "
        "at least 0.0, got -1.0",
        "model.layers.2.input_layernorm": "its forward is set on the instance",
        "model.layers.2.post_attention_layernorm": "it has a bias",
        "model.layers.0.linear_attn.norm": "rms_norm_gated: activation must be one of silu, "
        "sigmoid, swish, got 'gelu'",
        "model.layers.1.post_attention_layernorm": "it has no eps",
        "extra": "rlk_qwen3next has no replacement for a class of torch.nn.modules.normalization",
    }
    assert len(report.changed) == SITES - 6
    assert f"left alone: {reasons['extra']}" in str(report)
    after = {path: type(module) for path, module in model.named_modules()}
    assert {path for path in before if before[path] is after[path] and path in reasons} == set(
        reasons
    )


def test_patch_model_without_a_site_is_refused():
    with pytest.raises(ArgumentError) as caught:
        patch(torch.nn.LayerNorm(4))
    expected = "patch: model must hold a norm of Qwen3-Next, got LayerNorm without one"
    assert str(caught.value) == expected


def test_patch_initialisation_of_a_patched_module_is_still_theirs(model):
    patch(model)
    assert set(map(type, norms(model).values())).isdisjoint(CLASSES)
    norm = model.model.norm
    norm._is_hf_initialized = norm.weight._is_hf_initialized = False
    model._init_weights(norm)
    assert not norm.weight.any()


def test_supported_range_stated_elsewhere_is_the_one_of_the_code():
    matrix = re.search(r"^transformers = \[(.*)\]", (ROOT / "hatch.toml").read_text(), re.MULTILINE)
    versions = re.findall(r'"([^"]+)"', matrix[1])
    assert versions[0] == sites.OLDEST_TRANSFORMERS
    assert versions[-1].rpartition(".")[0] == sites.NEWEST_TRANSFORMERS
    assert transformers.__version__ in versions
    stated = f"transformers {sites.OLDEST_TRANSFORMERS} to {sites.NEWEST_TRANSFORMERS}."
    assert stated in (ROOT / "packages/rlk-qwen3next/README.md").read_text()


def test_patch_model_built_tied_keeps_one_weight(build):
    model = build(tie_word_embeddings=True)
    patch(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
