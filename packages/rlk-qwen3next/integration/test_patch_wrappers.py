# SPDX-License-Identifier: Apache-2.0
"""What holds a module of the model, or is held by it, outlives patching."""

import pytest
import torch
import torch.distributed as dist
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

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
from rlk_qwen3next import patch, unpatch


@DUPLICATES
def test_patched_model_copy_is_patched_and_can_be_unpatched(patching, duplicate):
    patching.assert_copy_is_patched(duplicate)


def test_patch_modules_parameters_and_flags_are_the_same_objects(model):
    model.eval()
    model.model.layers[0].input_layernorm.train()
    model.model.norm.weight.requires_grad_(False)
    model.model.layers[1].input_layernorm.to(torch.bfloat16)

    before = held(model)
    for function in (patch, unpatch):
        function(model)
        assert_same_objects(held(model), before)


def test_patch_hooks_registered_before_still_run_and_can_be_removed(model, results):
    norm = model.model.layers[0].input_layernorm
    seen = []
    handles = [
        norm.register_forward_pre_hook(lambda m, x: seen.append("forward_pre")),
        norm.register_forward_hook(lambda m, x, y: seen.append("forward")),
        norm.register_full_backward_hook(lambda m, dx, dy: seen.append("backward")),
        norm.weight.register_hook(lambda g: seen.append("weight")),
    ]
    patch(model)
    results(model)
    assert sorted(seen) == ["backward", "forward", "forward_pre", "weight"]
    for handle in handles:
        handle.remove()
    results(model)
    assert len(seen) == 4


def test_patch_optimizer_built_before_updates_what_the_model_computes_with(model, results):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    patch(model)
    norm = model.model.norm
    before, gradient = norm.weight.detach().clone(), results(model)["model.norm.weight"]
    optimizer.step()
    assert_same_bits(norm.weight.detach(), before - 0.5 * gradient)
    x = torch.ones(1, 64)
    expected = 1 / torch.sqrt(torch.ones(()).double() + norm.eps) * (1 + norm.weight.double())
    assert_same_bits(norm(x)[0].bfloat16(), expected.bfloat16())


def test_patch_norm_that_occurs_twice_is_changed_once(model):
    layers = model.model.layers
    layers[1].input_layernorm = layers[0].input_layernorm
    layers[2].input_layernorm.weight = layers[0].input_layernorm.weight
    report = patch(model)
    assert len(report.changed) == 13
    assert layers[1].input_layernorm is layers[0].input_layernorm
    assert layers[2].input_layernorm.weight is layers[0].input_layernorm.weight


def test_patch_under_checkpointing_keeps_the_bits(build, results):
    def run(checkpointing):
        # Checkpointing turns the cache off, and without it transformers adds in another order.
        model = build(use_cache=False)
        patch(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        with rlk.trace() as launches:
            return results(model), len([x for x in launches if x.direction == "forward"])

    (expected, once), (actual, twice) = run(False), run(True)
    assert_same_results(actual, expected)
    # All but the last norm are in layers, which are computed again.
    assert twice == 2 * once - 1


def test_patch_compiled_modules_follow_in_both_directions(build):
    torch.compiler.reset()
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    model = build()
    norm, in_place = model.model.norm, model.model.layers[0].input_layernorm
    outside = torch.compile(norm, backend="eager")
    in_place.compile(backend="eager")
    model.model.norm = outside
    original = [outside(x), in_place(x)]
    report = patch(model)
    assert "model.norm._orig_mod" in {site.path for site in report.changed}
    with rlk.trace() as launches:
        found = [outside(x), in_place(x)]
    assert len(launches) == 2
    twin = build()
    patch(twin)
    expected = [twin.model.norm(x), twin.model.layers[0].input_layernorm(x)]
    for actual, wanted in zip(found, expected, strict=True):
        assert_same_bits(actual, wanted)
    unpatch(model)
    with rlk.trace() as launches:
        found = [outside(x), in_place(x)]
    assert launches == []
    for actual, wanted in zip(found, original, strict=True):
        assert_same_bits(actual, wanted)


def hook(model):
    """accelerate's hooks, as a model spread over devices gets them."""
    for module in model.modules():
        if isinstance(module, theirs.Qwen3NextRMSNorm):
            add_hook_to_module(module, AlignDevicesHook("cpu", io_same_device=True))


def unhook(model):
    remove_hook_from_module(model, recurse=True)


@pytest.mark.parametrize("order", ["hook first", "patch first"])
def test_patch_beside_hooks_of_accelerate_takes_effect_and_ends(patching, build, results, order):
    model = patching.unhooked(hook, unhook, order)
    unpatch(model)
    assert_same_results(results(model), results(build()))


def shard(model):
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for module in model.modules():
        if isinstance(module, theirs.Qwen3NextRMSNorm):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("order", ["shard first", "patch first"])
@one_rank()
def test_patch_norms_sharded_on_their_own_stay_sharded(patching, build, results, order):
    model, sharded = build(), build()
    shard(sharded)
    for step in (shard, patch) if order == "shard first" else (patch, shard):
        step(model)
    norms = [m for m in model.modules() if isinstance(m, theirs.Qwen3NextRMSNorm)]
    assert all(isinstance(norm, FSDPModule) for norm in norms)

    assert_same_results(whole(results(model)), patching.patched_results())
    assert patch(model).changed == ()
    assert len(unpatch(model).changed) == 14
    assert all(isinstance(norm, FSDPModule) for norm in norms)
    # A hook between two uses of a tensor changes the order in which autograd adds.
    assert_same_results(whole(results(model)), whole(results(sharded)))
