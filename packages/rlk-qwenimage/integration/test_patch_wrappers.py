# SPDX-License-Identifier: Apache-2.0
"""What holds a module of the model, or is held by it, outlives patching."""

import diffusers
import pytest
import torch
import torch.distributed as dist
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from diffusers.models.transformers import transformer_qwenimage as theirs
from torch.distributed.fsdp import FSDPModule, fully_shard

import rlk
from rlk.compare import assert_same_bits
from rlk.test_support.patched_models import (
    DUPLICATES,
    assert_same_objects,
    assert_same_results,
    held,
    one_rank,
    whole,
)
from rlk_qwenimage import patch, unpatch

SITES = 18


@DUPLICATES
def test_patched_model_copy_is_patched_and_can_be_unpatched(patching, duplicate):
    patching.assert_copy_is_patched(duplicate)


def test_patch_modules_parameters_and_processors_are_the_same_objects(model):
    model.eval()
    model.transformer_blocks[0].img_mod.train()
    model.norm_out.linear.weight.requires_grad_(False)

    def all_held():
        processors = {i: (b.attn.processor,) for i, b in enumerate(model.transformer_blocks)}
        return [*held(model), processors]

    before = all_held()
    for function in (patch, unpatch):
        function(model)
        assert_same_objects(all_held(), before)


def test_patch_hooks_registered_before_still_run(model, results):
    block = model.transformer_blocks[0]
    seen = []
    modules = {
        "block": block, "norm": block.img_norm1, "mod": block.img_mod, "linear": block.img_mod[1],
        "out": model.norm_out,
    }  # fmt: skip
    for name, module in modules.items():
        module.register_forward_hook(lambda m, x, y, name=name: seen.append(name))
    block.img_mod[1].weight.register_hook(lambda g: seen.append("weight"))
    patch(model)
    results(model)
    assert sorted(seen) == sorted([*modules, "weight"])


def test_patch_optimizer_built_before_updates_what_the_model_computes_with(model, results):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    patch(model)
    weight = model.transformer_blocks[1].txt_mod[1].weight
    before = weight.detach().clone()
    gradient = results(model)["transformer_blocks.1.txt_mod.1.weight"]
    assert gradient.abs().sum() > 0
    optimizer.step()
    assert_same_bits(weight.detach(), before - 0.5 * gradient)


def test_patch_processor_shared_by_all_blocks_is_changed_once(model, results):
    model.transformer_blocks[1].attn.set_processor(model.transformer_blocks[0].attn.processor)
    original = results(model)
    assert len(patch(model).changed) == SITES
    assert patch(model).changed == ()
    unpatch(model)
    assert_same_results(results(model), original)


def test_patch_under_checkpointing_keeps_the_bits(build, results):
    def run(checkpointing):
        model = build().train()
        patch(model)
        if checkpointing:
            model.enable_gradient_checkpointing()
        with rlk.trace() as launches:
            return results(model), len([x for x in launches if x.direction == "forward"])

    (expected, once), (actual, more) = run(False), run(True)
    assert_same_results(actual, expected)
    assert more > once


def test_patch_compiled_model_follows_in_both_directions(model, arguments, close):
    torch.compiler.reset()
    given = arguments(model)
    compiled = torch.compile(model, backend="eager")

    def run(callee):
        with torch.no_grad(), rlk.trace() as launches:
            return callee(**given).sample, len(launches)

    original, _ = run(compiled)
    patch(model)
    expected, count = run(model)
    found, compiled_count = run(compiled)
    assert count == compiled_count > 0
    assert_same_bits(found, expected)
    unpatch(model)
    found, count = run(compiled)
    assert count == 0
    assert_same_bits(found, original)


def test_patch_blocks_compiled_by_diffusers_keep_the_bits(model, arguments):
    torch.compiler.reset()
    patch(model)
    with torch.no_grad():
        expected = model(**arguments(model)).sample
        model.compile_repeated_blocks(backend="eager")
        assert_same_bits(model(**arguments(model)).sample, expected)


def hook(model):
    """accelerate's hooks, as a model spread over devices gets them."""
    for module in list(model.modules()):
        if list(module.parameters(recurse=False)) or isinstance(module, torch.nn.Sequential):
            add_hook_to_module(module, AlignDevicesHook("cpu", io_same_device=True))
    add_hook_to_module(model.norm_out, AlignDevicesHook("cpu", io_same_device=True))


def unhook(model):
    remove_hook_from_module(model, recurse=True)


@pytest.mark.parametrize("order", ["hook first", "patch first"])
def test_patch_beside_hooks_of_accelerate_takes_effect_and_ends(patching, order):
    patching.unhooked(hook, unhook, order)


def test_patch_block_cached_by_diffusers_is_known_to_it(model, arguments):
    patch(model)
    model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.0))
    with torch.no_grad(), model.cache_context("cond"):
        cached = model(**arguments(model)).sample
    model.disable_cache()
    with torch.no_grad():
        assert_same_bits(cached, model(**arguments(model)).sample)


def shard(model):
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for block in model.transformer_blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model.norm_out, mesh=mesh)
    fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("order", ["shard first", "patch first"])
@one_rank()
def test_patch_blocks_sharded_on_their_own_stay_sharded(patching, build, results, order):
    def made(*steps):
        model = build()
        for step in steps:
            step(model)
        return model

    orders = {"shard first": (shard, patch), "patch first": (patch, shard)}
    model, other = (made(*steps) for steps in (orders.pop(order), *orders.values()))
    found = whole(results(model))
    assert_same_bits(found["sample"], patching.patched_results()["sample"])
    # A hook between two uses of temb changes the order in which autograd adds, in both alike.
    assert_same_results(found, whole(results(other)))
    assert patch(model).changed == ()
    assert len(unpatch(model).changed) == SITES
    for module in (*model.transformer_blocks, model.norm_out):
        assert isinstance(module, FSDPModule)
        assert isinstance(module, theirs.QwenImageTransformerBlock | theirs.AdaLayerNormContinuous)
    assert_same_results(whole(results(model)), whole(results(made(shard))))
