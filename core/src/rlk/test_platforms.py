# SPDX-License-Identifier: Apache-2.0
"""Where operators run: NVIDIA GPUs from one generation on, the CPU, and nowhere unvalidated."""

import importlib.util
from dataclasses import dataclass

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rlk import backends, dispatch, interpreter
from rlk.errors import BackendError, PlatformError
from rlk.execution import Execution
from rlk.operator import Backend
from rlk.test_support import tiny_backend, tiny_operator

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


@dataclass(frozen=True)
class Device:
    """A device of an extension of torch that is not installed."""

    type: str


class Operations(TorchDispatchMode):
    """Lists what torch is asked to compute or allocate."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def fresh_choices():
    dispatch.forget_choices()
    yield
    dispatch.forget_choices()


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that GPUs have this compute capability; lists the devices asked for."""
    asked = []

    def pretend(capability):
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device: asked.append(device) or capability
        )
        return asked

    return pretend


@pytest.fixture
def everywhere():
    """An operator whose only backend claims every platform, and the list of its loads."""
    loads = []
    platforms = ("cpu", "nvidia", "rocm", "npu", "musa", "meta", "mps", "xpu")
    row = Backend("any", lambda: loads.append(1) or tiny_backend("any"), platforms)
    return tiny_operator("tiny", backends=(row,)), loads


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 3), (12, 0)])
def test_choose_gpu_of_ampere_or_newer_is_accepted(gpu, everywhere, capability):
    asked = gpu(capability)
    assert dispatch.choose(everywhere[0], CUDA, "auto").backend.name == "any"
    assert asked == [CUDA]


@pytest.mark.parametrize("capability", [(7, 5), (7, 0), (3, 7)])
@pytest.mark.parametrize("requested", ["auto", "any"])
def test_choose_older_gpu_is_refused_before_any_load(gpu, everywhere, capability, requested):
    gpu(capability)
    operator, loads = everywhere
    with pytest.raises(PlatformError) as caught:
        dispatch.choose(operator, CUDA, requested)
    assert str(caught.value) == (
        "tiny: the GPU must have compute capability 8.0 or newer, "
        f"got {capability[0]}.{capability[1]}"
    )
    assert loads == []


@pytest.mark.parametrize("rows", [0, 2])
def test_forward_older_gpu_is_refused_before_any_allocation(gpu, everywhere, rows):
    gpu((7, 5))
    with FakeTensorMode(), Operations() as operations:
        x, weight = (torch.empty(*shape, device="cuda") for shape in ((rows, 3), (3,)))
        prepared = len(operations.names)
        with pytest.raises(PlatformError, match=r"8\.0 or newer, got 7\.5"):
            Execution(everywhere[0]).forward(x, weight, 1.0, "auto")
    assert prepared == 2
    assert operations.names[prepared:] == []


def test_choose_rocm_gpu_that_calls_itself_cuda_is_refused(monkeypatch, gpu, everywhere):
    asked = gpu((9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert dispatch.platform_of(CUDA) == "rocm"
    for requested in ("auto", "any"):
        with pytest.raises(PlatformError) as caught:
            dispatch.choose(everywhere[0], CUDA, requested)
        assert str(caught.value) == (
            "tiny: the device must be an NVIDIA GPU or the CPU, got rocm; "
            "no backend is validated there"
        )
    assert (asked, everywhere[1]) == ([], [])


@pytest.mark.parametrize(
    "device",
    [Device("npu"), Device("musa"), torch.device("mps"), torch.device("xpu"), torch.device("meta")],
    ids=lambda device: device.type,
)
def test_choose_unvalidated_platform_is_refused_by_name(everywhere, device):
    with pytest.raises(PlatformError, match=f"an NVIDIA GPU or the CPU, got {device.type}; "):
        dispatch.choose(everywhere[0], device, "auto")
    assert everywhere[1] == []


def test_choose_golden_on_a_gpu_serves_by_name_alone(gpu):
    gpu((9, 0))
    golden = tiny_backend()
    operator = tiny_operator("tiny", backends=(backends.golden(lambda: golden),))
    assert dispatch.choose(operator, CUDA, "golden").module is golden
    with pytest.raises(BackendError) as caught:
        dispatch.choose(operator, CUDA, "auto")
    assert str(caught.value) == (
        "tiny: no backend can run on nvidia (golden: it serves cpu unless asked for by name)"
    )


def test_choose_auto_takes_triton_on_a_gpu_and_golden_on_the_cpu(monkeypatch, gpu):
    gpu((9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    golden, triton = tiny_backend(), tiny_backend("triton")
    rows = (backends.triton(lambda: triton), backends.golden(lambda: golden))
    operator = tiny_operator("tiny", backends=rows)
    assert dispatch.choose(operator, CUDA, "auto").module is triton
    choice = dispatch.choose(operator, CPU, "auto")
    assert choice.module is golden
    assert choice.rejected == (("triton", "it serves nvidia unless asked for by name"),)


@pytest.fixture
def triton(monkeypatch):
    """An operator with a Triton row alone; Triton counts as installed, interpreter off."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(interpreter, "is_enabled", lambda: False)
    module = tiny_backend("triton")
    return tiny_operator("tiny", backends=(backends.triton(lambda: module),)), module


def test_choose_triton_on_the_cpu_needs_the_interpreter(monkeypatch, triton):
    operator, module = triton
    with pytest.raises(BackendError) as caught:
        dispatch.choose(operator, CPU, "triton")
    assert str(caught.value) == (
        'tiny: backend "triton" cannot run here: on the CPU it runs in Triton\'s interpreter, '
        "which TRITON_INTERPRET=1 turns on"
    )
    monkeypatch.setattr(interpreter, "is_enabled", lambda: True)
    assert dispatch.choose(operator, CPU, "triton").module is module
    with pytest.raises(BackendError, match="it serves nvidia unless asked for by name"):
        dispatch.choose(operator, CPU, "auto")


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_choose_triton_that_is_not_installed_is_named(monkeypatch, gpu, triton, device):
    gpu((9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match="it needs the package triton, which is not installed"):
        dispatch.choose(triton[0], device, "triton")


def test_explain_interpreter_that_cannot_start_is_a_reason(monkeypatch, triton):
    def fail():
        raise PlatformError("interpreter: fma must round to nearest even")

    monkeypatch.setattr(interpreter, "is_enabled", fail)
    reason = "loading failed: interpreter: fma must round to nearest even"
    assert dispatch.explain(triton[0], "cpu") == [("triton", reason)]
