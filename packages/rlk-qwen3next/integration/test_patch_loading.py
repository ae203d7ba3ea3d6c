# SPDX-License-Identifier: Apache-2.0
"""Checkpoints go both ways between a patched model and an unpatched one."""

import pytest
import torch
from safetensors import safe_open
from transformers import Qwen3NextForCausalLM

from rlk.compare import assert_same_bits
from rlk.test_support.patched_models import assert_same_state
from rlk_qwen3next import patch


@pytest.mark.parametrize("patched", ["the saved one", "the loaded one", "both"])
def test_state_dict_strict_loading_works_both_ways(patching, patched):
    patching.assert_state_dict_loads(patched)


def test_checkpoint_in_shards_saved_patched_loads_and_computes_the_same(build, tmp_path):
    model = build()
    names = set(model.state_dict())
    patch(model)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    found = set()
    for shard in shards:
        with safe_open(shard, "pt") as file:
            found |= set(file.keys())
    # Releases differ in how they store experts; norms have one name each.
    assert {n for n in found if "norm" in n} == {n for n in names if "norm" in n}

    loaded, report = Qwen3NextForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same_state(loaded.state_dict(), model.state_dict())
    sites = patch(loaded).changed
    assert len(sites) == 14
    # Norm by norm: the other modules of a CPU may add in another order at another address.
    for site in sites:
        norm, saved = (m.get_submodule(site.path) for m in (loaded, model))
        rows = torch.randn(7, norm.weight.numel(), generator=torch.Generator().manual_seed(3))
        inputs = (rows, rows.flip(0)) if site.path.endswith("linear_attn.norm") else (rows,)
        assert_same_bits(norm(*inputs), saved(*inputs), site.path)


def test_checkpoint_in_bfloat16_keeps_its_dtype_when_patched(build, tmp_path):
    build().to(torch.bfloat16).save_pretrained(tmp_path)
    model = Qwen3NextForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    patch(model)
    seen = []
    for site in patch(model).left:
        model.get_submodule(site.path).register_forward_hook(
            lambda module, inputs, output: seen.append((module.weight.dtype, output.dtype))
        )
    with torch.no_grad():
        logits = model(torch.arange(9)[None]).logits
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    assert len(seen) == 14
    assert logits.isfinite().all()
