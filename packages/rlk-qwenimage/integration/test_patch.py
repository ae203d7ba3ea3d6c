# SPDX-License-Identifier: Apache-2.0
"""Patching a model of diffusers and taking it back: what changes, and all that does not."""

import re
from collections import Counter
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers.models.normalization import AdaLayerNormContinuous, RMSNorm
from diffusers.models.transformers import transformer_qwenimage as theirs

import rlk
from rlk import registry
from rlk.compare import assert_same_bits, same_bits
from rlk.errors import ArgumentError
from rlk_qwenimage import (
    PatchSite,
    adaln_mod_projection,
    final_adaln_out,
    layer_norm_modulate,
    patch,
    unpatch,
)
from rlk_qwenimage.patching import sites

ROOT = Path(__file__).resolve().parents[3]
# A block: two modulations, its norms, its rotation, four norms of q and k; then text and output.
SITES = 2 * (2 + 1 + 1 + 4) + 1 + 1


def assert_same_results(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_same_bits(actual[name], expected[name], name)


def classes_of(model):
    found = {path: type(module) for path, module in model.named_modules()}
    blocks = enumerate(model.transformer_blocks)
    return {**found, **{f"{i}.processor": type(block.attn.processor) for i, block in blocks}}


def test_patch_every_operator_runs_as_often_as_a_model_calls_it(model, results):
    patch(model)
    with rlk.trace() as launches:
        results(model)
    found = Counter(x.operator for x in launches if x.direction == "forward")
    # Two blocks with four norms, query and key of text and image, and norms of those; the text's.
    calls = {
        "layer_norm_modulate": 2 * 4, "multi_axis_rope": 2 * 4, "rms_norm": 2 * 4 + 1,
        "adaln_mod_projection": 2 * 2, "final_adaln_out": 1,
    }  # fmt: skip
    assert found.keys() == calls.keys()
    for operator, count in calls.items():
        # Each call makes the same number of launches.
        assert found[operator] % count == 0, operator
    assert {x.operator for x in launches if x.direction == "backward"} >= found.keys()
    assert {x.backend for x in launches} == {"golden"}


def test_patch_modulations_and_norms_compute_what_our_operators_compute(model, results):
    patch(model)
    calls = {}

    def keep(path):
        return lambda module, inputs, output: calls.update({path: (module, *inputs, output)})

    kinds = (torch.nn.Sequential, AdaLayerNormContinuous, RMSNorm)
    expected = {path for path, m in model.named_modules() if isinstance(m, kinds)}
    for path in expected:
        model.get_submodule(path).register_forward_hook(keep(path))
    results(model)
    assert calls.keys() == expected
    for path, (module, *inputs, output) in calls.items():
        assert_same_bits(output, by_hand(module, *inputs), path)


def by_hand(module, x, *rest):
    """One call of an operator with the parameters of a patched module."""
    if isinstance(module, RMSNorm):
        rms_norm = registry.public_function(registry.find("rms_norm"))
        return rms_norm(x, module.weight, module.eps)
    if isinstance(module, AdaLayerNormContinuous):
        return final_adaln_out(x, *rest, module.linear.weight, module.linear.bias, module.norm.eps)
    norm1, norm2 = adaln_mod_projection(x, module[1].weight, module[1].bias, "img")
    return torch.cat([*norm1, *norm2], -1)


def test_patch_norms_of_a_block_are_modulated_in_one_operator(model):
    block = model.transformer_blocks[0]
    patch(model)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 7, 48, generator=generator)
    mod = torch.randn(2, 3 * 48, generator=generator)
    out, gate = block._modulate(block.img_norm1(x), mod)
    shift, scale, expected_gate = mod.chunk(3, -1)
    assert_same_bits(out, layer_norm_modulate(x, scale, shift, 1e-6))
    assert_same_bits(gate, expected_gate[:, None])


def test_patch_attention_is_theirs_with_our_rotation(model, monkeypatch, close):
    attention = model.transformer_blocks[0].attn
    generator = torch.Generator().manual_seed(4)
    image, text = (torch.randn(2, n, 48, generator=generator) for n in (12, 5))
    tables = [
        torch.polar(torch.ones(n, 8), torch.randn(n, 8, generator=generator)) for n in (12, 5)
    ]
    patch(model)
    found = attention(image, encoder_hidden_states=text, image_rotary_emb=tables)

    rope = registry.public_function(registry.find("multi_axis_rope"))
    attention.processor.__class__ = theirs.QwenDoubleStreamAttnProcessor2_0
    original = attention(image, encoder_hidden_states=text, image_rotary_emb=tables)
    monkeypatch.setattr(
        theirs, "apply_rotary_emb_qwen", lambda x, freqs, use_real: rope(x, freqs.real, freqs.imag)
    )
    expected = attention(image, encoder_hidden_states=text, image_rotary_emb=tables)
    for actual, wanted, before in zip(found, expected, original, strict=True):
        assert_same_bits(actual, wanted)
        close(actual, before)


def test_patch_model_output_and_gradients_stay_close_to_theirs(model, results, close):
    before = results(model)
    patch(model)
    after = results(model)
    assert after.keys() == before.keys()
    assert not all(same_bits(after[name], before[name]) for name in before)
    close(after["sample"], before["sample"])
    for name in before:
        close(after[name], before[name], "gradient_accuracy")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_patch_model_in_low_precision_stays_close_to_theirs(model, arguments, dtype, close):
    model.to(dtype)
    with torch.no_grad():
        before = model(**arguments(model)).sample
        patch(model)
        after = model(**arguments(model)).sample
    assert after.dtype == dtype
    # Theirs rounds each step, ours each site: as far apart as BF16 allows, in both.
    close(after, before, dtype=torch.bfloat16)


def test_patch_model_under_autocast_stays_close_to_theirs(model, results, close):
    with torch.autocast("cpu", torch.bfloat16):
        before = results(model)
    patch(model)
    with torch.autocast("cpu", torch.bfloat16), rlk.trace() as launches:
        after = results(model)
    assert launches
    assert {name: t.dtype for name, t in after.items()} == {n: t.dtype for n, t in before.items()}
    close(after["sample"], before["sample"], dtype=torch.bfloat16)


def test_patch_unpatch_and_patch_again_return_the_same_bytes(model, results):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    classes, original = classes_of(model), results(model)
    patch(model)
    patched = results(model)
    assert list(model.state_dict()) == list(state)
    unpatch(model)
    assert classes_of(model) == classes
    assert_same_results(results(model), original)
    patch(model)
    assert_same_results(results(model), patched)
    assert_same_results(model.state_dict(), state)


def test_patch_report_names_every_site(model):
    model.norm_out.norm.eps = 0.5
    report = patch(model)
    assert (len(report.changed), report.left) == (SITES, ())
    found = {site.path: site for site in report.changed}
    block = "transformer_blocks.1"
    processor = "QwenDoubleStreamAttnProcessor2_0"
    for site in (
        PatchSite(f"{block}.img_mod", "Sequential", "adaln_mod_projection"),
        PatchSite(f"{block}.txt_mod", "Sequential", "adaln_mod_projection"),
        PatchSite(block, "QwenImageTransformerBlock", "layer_norm_modulate", 1e-6),
        PatchSite(f"{block}.attn.processor", processor, "multi_axis_rope"),
        PatchSite(f"{block}.attn.norm_added_k", "RMSNorm", "rms_norm", 1e-6),
        PatchSite("txt_norm", "RMSNorm", "rms_norm", 1e-6),
        PatchSite("norm_out", "AdaLayerNormContinuous", "final_adaln_out", 0.5),
    ):
        assert found[site.path] == site
    header, *rows, last = str(report).splitlines()
    assert header.split() == ["site", "class", "operator", "eps"]
    assert rows[-1].split() == [
        "norm_out", "AdaLayerNormContinuous", "final_adaln_out", "0.5", "patched",
    ]  # fmt: skip
    assert last == f"{SITES} patched, 0 left alone"


def test_patch_twice_changes_nothing_and_says_so(model):
    patch(model)
    classes = classes_of(model)
    report = patch(model)
    assert report.changed == ()
    assert {site.reason for site in report.left} == {"it is patched already"}
    assert classes_of(model) == classes
    unpatch(model)
    report = unpatch(model)
    assert report.changed == ()
    assert {site.reason for site in report.left} == {"it is not patched"}


def test_patch_initialised_anew_or_added_parts_are_patched_by_the_next_call(model, build):
    patch(model)
    model.transformer_blocks[0] = build().transformer_blocks[0]
    report = patch(model)
    assert {site.path.split(".")[1] for site in report.changed} == {"0"}
    assert len(report.changed) == 8


def test_patch_without_the_packages_of_other_operators_leaves_their_sites(model, monkeypatch):
    monkeypatch.setattr(sites.registry, "operators", dict)
    report = patch(model)
    reasons = Counter(site.reason for site in report.left)
    assert reasons == {
        "multi_axis_rope is not installed; install rlk-rope": 2,
        "rms_norm is not installed; install rlk-qwen3next": 2 * 4 + 1,
    }
    assert {site.operator for site in report.changed} == {
        "adaln_mod_projection", "layer_norm_modulate", "final_adaln_out",
    }  # fmt: skip
    processor = model.transformer_blocks[0].attn.processor
    assert type(processor) is theirs.QwenDoubleStreamAttnProcessor2_0


def test_supported_range_stated_elsewhere_is_the_one_of_the_code():
    matrix = re.search(r"^diffusers = \[(.*)\]", (ROOT / "hatch.toml").read_text(), re.MULTILINE)
    versions = re.findall(r'"([^"]+)"', matrix[1])
    assert versions[0] == sites.OLDEST_DIFFUSERS
    assert versions[-1].rpartition(".")[0] == sites.NEWEST_DIFFUSERS
    assert diffusers.__version__ in versions
    stated = f"diffusers {sites.OLDEST_DIFFUSERS} to {sites.NEWEST_DIFFUSERS}."
    assert stated in (ROOT / "packages/rlk-qwenimage/README.md").read_text()


@pytest.mark.parametrize("module", [torch.nn.LayerNorm(4), RMSNorm(4, eps=1e-6)])
def test_patch_model_without_a_part_of_qwen_image_is_refused(module):
    with pytest.raises(ArgumentError) as caught:
        patch(module)
    kind = type(module).__name__
    expected = f"patch: model must hold a part of Qwen-Image, got {kind} without one"
    assert str(caught.value) == expected
