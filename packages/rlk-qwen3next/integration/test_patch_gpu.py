# SPDX-License-Identifier: Apache-2.0
"""A patched model on a GPU: the bits of the CPU at every site, and its own when unpatched."""

import copy

import pytest
import torch

import rlk
from rlk.compare import assert_same_bits
from rlk_qwen3next import patch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def run(module, inputs, dy, backend):
    """y, the row gradients and dweight of one site."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with rlk.use_backend(backend), rlk.trace() as launches:
        y = module(*leaves)
        gradients = torch.autograd.grad(y, [*leaves, module.weight], dy)
    assert {launch.backend for launch in launches} == {backend}
    return y.detach(), *gradients


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("order", ["patch first", "move first"])
def test_patched_model_on_a_gpu_has_the_bits_of_the_cpu_at_every_site(build, results, dtype, order):
    model = build().to(dtype)
    steps = [patch, lambda model: model.cuda()]
    for step in steps if order == "patch first" else reversed(steps):
        step(model)
    sites = patch(model).left
    assert len(sites) == 14
    kept = {}

    def keep(path):
        def hook(module, inputs, y):
            kept[path] = [x.detach() for x in inputs]
            y.register_hook(lambda dy: kept[path].append(dy.detach()))

        return hook

    for site in sites:
        model.get_submodule(site.path).register_forward_hook(keep(site.path))
    results(model)
    assert set(kept) == {site.path for site in sites}
    for site in sites:
        module, (*inputs, dy) = model.get_submodule(site.path), kept[site.path]
        module._forward_hooks.clear()
        twin = copy.deepcopy(module).cpu()
        expected = run(twin, [x.cpu() for x in inputs], dy.cpu(), "golden")
        for backend in ("cuda", "triton"):
            for actual, wanted in zip(run(module, inputs, dy, backend), expected, strict=True):
                assert_same_bits(actual.cpu(), wanted, f"{site.path} on {backend}")


def test_unpatched_model_on_a_gpu_has_its_own_bits_again(patching, build):
    model = build().cuda().bfloat16().eval()
    ids = torch.arange(46, device="cuda").reshape(2, 23)

    def logits():
        with torch.no_grad():
            return model(ids).logits

    patching.assert_bits_come_and_go(model, logits)


def test_patched_model_compiled_on_a_gpu_keeps_the_bits_of_its_norms():
    torch.compiler.reset()
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    norm = theirs.Qwen3NextRMSNorm(2048).cuda().bfloat16()
    torch.nn.init.normal_(norm.weight)
    patch(norm)
    x = torch.randn(257, 2048, device="cuda", dtype=torch.bfloat16)
    expected = norm(x)
    assert_same_bits(torch.compile(norm)(x), expected)
