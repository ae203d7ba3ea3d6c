# SPDX-License-Identifier: Apache-2.0
"""What only a GPU shows of a CUDA backend: launches, streams, devices, the strict-math probe."""

import json

import pytest
import torch

from rlk import trace
from rlk.compare import assert_same_bits
from rlk.cuda import build, library, probe, sources, toolchain
from rlk.cuda import launch as cuda_launch
from rlk.errors import BackendError, PlatformError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

# Flags of a build whose arithmetic differs: what they replace, and by what.
STRICT = ("-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")
LOOSE = {
    "contraction": ("-fmad=true", *STRICT[1:]),
    "flush": (STRICT[0], "-ftz=true", *STRICT[2:]),
    "division": (*STRICT[:2], "-prec-div=false", STRICT[3]),
    "square root": (*STRICT[:3], "-prec-sqrt=false"),
    "fast math": ("-use_fast_math",),
}
# 100 ms of an H200's clock: longer than any launch.
LONG = 200_000_000


@pytest.fixture
def module(demo, source, cache, needs_nvcc):
    """The backend of the demo, in a cache of this test."""
    return cuda_launch.KernelModule(demo, source)


def loose_build(monkeypatch, source, generated, name):
    """The demo compiled with these flags, whose manifest says so."""
    kept = tuple(flag for flag in toolchain._FLAGS if flag not in STRICT)
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "_FLAGS", (*kept, *LOOSE[name]))
        arch = cuda_launch.device_arch(torch.cuda.current_device())
        return build.build(source, "demo", generated, arch)


def disguise(path):
    """Let the manifest of an entry say that its flags are strict."""
    manifest = build.read_manifest(path.parent)
    manifest["flags"] = list(toolchain.compile_flags("sm_90"))
    (path.parent / sources.MANIFEST).write_text(json.dumps(manifest))
    return library.Library(path, "demo")


def test_forward_on_a_gpu_computes_and_reports_itself(module):
    x = torch.tensor([[1.0, 2.0, 4.0], [-8.0, 0.5, 3.0]], device="cuda")
    weight = torch.tensor([2.0, -3.0, 0.5], device="cuda")
    with trace() as launches:
        y, first = module.forward(x, weight, shift=1.0, mode="plain")
    expected = torch.tensor([[3.0, -5.0, 3.0], [-15.0, -0.5, 2.5]])
    assert_same_bits(y.cpu(), expected, "y")
    assert_same_bits(first.cpu(), torch.tensor([1.0, -8.0]), "first")
    assert [(one.backend, one.kernel) for one in launches] == [("cuda", "demo_forward")]
    assert launches[0].binary == module.load(0).library.digest


def test_forward_strided_views_reads_them_by_their_strides(module):
    whole = torch.arange(24.0, device="cuda").view(4, 6)
    weight = torch.tensor([1.0, 9.0, 2.0, 9.0, 4.0, 9.0], device="cuda")[::2]
    y, _ = module.forward(whole.t()[1:5, 1:], weight, shift=0.0, mode="plain")
    expected = whole.cpu().t()[1:5, 1:] * torch.tensor([1.0, 2.0, 4.0])
    assert_same_bits(y.cpu(), expected, "y")


def test_forward_error_of_the_launcher_reaches_the_caller(module):
    x, weight = torch.ones(1, 2, device="cuda"), torch.ones(2, device="cuda")
    with pytest.raises(BackendError, match="must run demo_forward, got CUDA error 1"):
        module.forward(x, weight, shift=0.0, mode="negated")


def test_forward_on_another_stream_waits_for_its_work(module):
    x, weight = torch.zeros(64, 64, device="cuda"), torch.ones(64, device="cuda")
    module.forward(x, weight, shift=0.0, mode="plain")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        x.fill_(3.0)
        y, _ = module.forward(x, weight, shift=0.0, mode="plain")
    stream.synchronize()
    assert_same_bits(y.cpu(), torch.full((64, 64), 3.0), "y")


def test_forward_first_call_inside_a_capture_replays(module):
    x, weight = torch.full((8, 8), 2.0, device="cuda"), torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = module.forward(x, weight, shift=1.0, mode="plain")
    x.fill_(5.0)
    graph.replay()
    assert_same_bits(y.cpu(), torch.full((8, 8), 6.0), "y")


def test_forward_on_the_second_gpu_leaves_the_first_current(module):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    x, weight = torch.full((8, 8), 2.0, device="cuda:1"), torch.ones(8, device="cuda:1")
    with torch.cuda.device(0):
        y, _ = module.forward(x, weight, shift=1.0, mode="plain")
        assert torch.cuda.current_device() == 0
    assert y.device == x.device
    assert_same_bits(y.cpu(), torch.full((8, 8), 3.0), "y")


def test_probe_of_a_strict_build_finds_nothing(module):
    assert probe.run(module.load(0).library, 0) == []


@pytest.mark.parametrize("name", LOOSE)
def test_library_of_a_loose_build_is_refused(monkeypatch, source, generated, cache, name):
    path = loose_build(monkeypatch, source, generated, name)
    with pytest.raises(BackendError, match="must be compiled with IEEE arithmetic"):
        library.Library(path, "demo")


@pytest.mark.parametrize(
    ("name", "subjects"),
    [
        ("contraction", {"separate roundings"}),
        ("flush", {"subnormals"}),
        ("division", {"division"}),
        ("square root", {"square root"}),
        ("fast math", {"separate roundings", "subnormals", "division", "square root"}),
    ],
)
def test_probe_of_a_disguised_loose_build_names_its_subjects(
    monkeypatch, source, generated, cache, name, subjects
):
    opened = disguise(loose_build(monkeypatch, source, generated, name))
    found = set(probe.run(opened, 0))
    # An approximate quotient or root also loses subnormals.
    assert subjects <= found <= subjects | {"subnormals"}
    with pytest.raises(PlatformError, match="as IEEE 754 says, got other bits"):
        probe.require(opened, 0)
