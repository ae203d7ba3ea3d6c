# SPDX-License-Identifier: Apache-2.0
"""Checkpoints go both ways between a patched model and an unpatched one."""

import json

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rlk.test_support.patched_models import assert_same_results, assert_same_state, spoil
from rlk_qwenimage import patch, unpatch


@pytest.mark.parametrize("patched", ["the saved one", "the loaded one", "both"])
def test_state_dict_strict_loading_works_both_ways(patching, patched):
    patching.assert_state_dict_loads(patched)


@pytest.mark.parametrize("order", ["load first", "patch first"])
def test_safetensors_file_loads_strictly_before_and_after_patching(build, results, tmp_path, order):
    source = build()
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    patch(source)
    expected = results(source)
    target = build()
    spoil(target)
    steps = [
        lambda: target.load_state_dict(load_file(tmp_path / "weights.safetensors"), strict=True)
    ]
    steps.insert(order == "load first", lambda: patch(target))
    for step in steps:
        step()
    assert_same_results(results(target), expected)


def test_checkpoint_in_shards_saved_patched_loads_and_computes_the_same(build, results, tmp_path):
    model = build()
    original, names = results(model), list(model.state_dict())
    patch(model)
    expected = results(model)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    found = []
    for shard in shards:
        with safe_open(shard, "pt") as file:
            found += file.keys()
    (index,) = tmp_path.glob("*.index.json")
    stored = json.loads(index.read_text())["weight_map"]
    assert sorted(found) == sorted(stored) == sorted(names)

    loaded, report = QwenImageTransformer2DModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert_same_state(loaded.state_dict(), model.state_dict())
    for function, wanted in ((None, original), (patch, expected), (unpatch, original)):
        if function:
            function(loaded)
        assert_same_results(results(loaded), wanted)


def test_checkpoint_in_bfloat16_keeps_its_dtype_when_patched(build, arguments, tmp_path):
    build().to(torch.bfloat16).save_pretrained(tmp_path)
    model = QwenImageTransformer2DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    patch(model)
    with torch.no_grad():
        sample = model(**arguments(model)).sample
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert sample.dtype == torch.bfloat16
    assert sample.isfinite().all()
