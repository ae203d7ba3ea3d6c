# SPDX-License-Identifier: Apache-2.0
"""A patched model on a GPU: equal bits at every site on both backends, and its own unpatched."""

import copy
import importlib
from pathlib import Path

import pytest
import torch

import rlk
from rlk.compare import assert_same_bits
from rlk_qwenimage import ModulationLinear, patch

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture
def record(arguments, monkeypatch):
    """The sites of an unpatched model with what they read and got in a training step."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    sites_of = importlib.import_module("qwenimage_sites")

    def recorded(model):
        sites = sites_of.find(model)
        with sites_of.recording(model, sites):
            sample = model(**arguments(model)).sample
            sample.backward(torch.linspace(-1, 1, sample.numel()).view(sample.shape).to(sample))
        return sites_of.reached(sites), sites_of.find

    return recorded


def run(site, backend, recorded):
    with rlk.use_backend(backend), rlk.trace() as launches:
        found = site.run(*recorded)
    assert {launch.backend for launch in launches} == {backend}
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_patched_model_on_a_gpu_has_the_same_bits_on_both_backends(build, record, close, dtype):
    model = build().to(dtype).cuda()
    sites, find = record(model)
    patch(model)
    twins = find(copy.deepcopy(model).cpu())
    for key, site in sites.items():
        recorded = site.recorded.rows(slice(None))
        by_cuda, by_triton = (run(site, backend, recorded) for backend in ("cuda", "triton"))
        twin = site if site.kind == "rotation" else twins[key]
        inputs, dy = recorded
        golden = run(twin, "golden", ([x.cpu() for x in inputs], dy.cpu()))
        assert by_cuda.keys() == by_triton.keys() == golden.keys()
        for name, found in by_cuda.items():
            what = f"{name} of {site.path}"
            assert_same_bits(by_triton[name], found, what)
            if site.kind in ("modulation", "output norm"):
                # Tensor cores add the products of a step in a way of their own.
                judgment = "forward_accuracy" if name == "y" else "gradient_accuracy"
                close(found.cpu(), golden[name], judgment)
            else:
                assert_same_bits(found.cpu(), golden[name], what)


def test_unpatched_model_on_a_gpu_has_its_own_bits_again(patching, build, arguments):
    model = build().cuda().bfloat16().eval()

    def sample():
        with torch.no_grad():
            return model(**arguments(model)).sample

    patching.assert_bits_come_and_go(model, sample)


def test_patched_layer_compiled_on_a_gpu_keeps_its_bits():
    torch.compiler.reset()
    torch.manual_seed(3)
    layer = ModulationLinear(3072, 18432, device="cuda", dtype=torch.bfloat16)
    temb = torch.randn(5, 3072, device="cuda", dtype=torch.bfloat16)
    assert_same_bits(torch.compile(layer)(temb), layer(temb))
