# SPDX-License-Identifier: Apache-2.0
"""Steps of a backend: packed as declared, reported by name, refused by name."""

import struct
from pathlib import Path

import pytest
import torch

from rlk import launch, trace
from rlk.cuda import steps as module
from rlk.cuda.header import Layout
from rlk.cuda.steps import Steps
from rlk.errors import BackendError
from rlk.reduce.exact_sum import kernel_cuda
from rlk.reduce.exact_sum.form import SumForm

LAYOUT = Layout("DemoStep", (("void*", "out"), ("long long", "count"), ("int", "device")))


class Loaded:
    """Stands for a binary: notes what its launchers are given and returns `status`."""

    digest = "d" * 64

    def __init__(self):
        self.called = []
        self.status = 0

    def function(self, name, arguments):
        def call(packed):
            self.called.append((name, packed))
            return self.status

        return call

    def check(self, status, what):
        if status:
            raise BackendError(f"demo must run {what}, got {status}")


@pytest.fixture
def loaded(monkeypatch):
    made = Loaded()
    monkeypatch.setattr(module, "binary_for", lambda *arguments: made)
    return made


@pytest.fixture
def demo():
    return Steps("demo", Path("kernel_cuda.cu"), {"double": LAYOUT, "halve": LAYOUT})


def test_headers_of_a_source_are_generated_beside_that_of_its_launchers():
    made = Steps("demo", Path("kernel_cuda.cu"), {"double": LAYOUT}, {"shapes.h": "// none"})
    assert made.generated.keys() == {"rlk_demo.h", "shapes.h"}
    assert made.generated["shapes.h"] == "// none"


def test_launch_packs_the_fields_and_reports_the_step(loaded, demo):
    with trace() as launches, launch.operator_call("whole", "backward"):
        demo.launch("halve", 1, 4096, 7, 1)
    assert loaded.called == [("rlk_demo_halve", struct.pack("Pqi4x", 4096, 7, 1))]
    (one,) = launches
    assert (one.operator, one.direction) == ("whole", "backward")
    assert (one.backend, one.kernel, one.binary) == ("cuda", "demo.halve", "d" * 64)


def test_enqueuer_names_the_call_that_it_is_told(loaded, demo):
    enqueue = demo.enqueuer("double", 1)
    with trace() as launches, launch.operator_call("other", "forward"):
        enqueue(4096, 7, 1, call=("whole", "backward"))
    assert loaded.called == [("rlk_demo_double", struct.pack("Pqi4x", 4096, 7, 1))]
    (one,) = launches
    assert (one.operator, one.direction, one.kernel) == ("whole", "backward", "demo.double")


def test_launch_error_of_a_step_is_raised_by_its_name(loaded, demo):
    loaded.status = 2
    with pytest.raises(BackendError, match="demo must run demo.double, got 2"):
        demo.launch("double", 0, 0, 0, 0)


def test_launch_loads_once_a_device_and_again_after_a_fork(monkeypatch, demo):
    loads = []

    def binary_for(name, source, generated, device):
        loads.append(device)
        return Loaded()

    monkeypatch.setattr(module, "binary_for", binary_for)
    for device in (0, 1, 0):
        demo.launch("double", device, 0, 0, device)
    assert loads == [0, 1]
    module._after_fork()
    demo.launch("double", 0, 0, 0, 0)
    assert loads == [0, 1, 0]


def test_header_declares_every_launcher_of_the_source(demo):
    text = demo.generated["rlk_demo.h"]
    for entry in ("double", "halve"):
        assert f"RLK_EXPORT int rlk_demo_{entry}(const DemoStep* a);" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_planned_carry_hands_its_launcher_a_state_in_fp64_and_zeros(loaded, monkeypatch, dtype):
    monkeypatch.setattr(kernel_cuda, "current_stream", lambda device: 4096)
    monkeypatch.setattr(kernel_cuda.steps, "_loaded", {})
    state = torch.zeros(13, 5, dtype=torch.int64)
    plan = kernel_cuda.plan_carry(torch.zeros(10, dtype=dtype)[::2], ("whole", "backward"))
    carried, zeros = plan(state)
    assert (carried.shape, carried.dtype) == ((13, 5), torch.float64)
    assert (zeros.shape, zeros.stride(), zeros.dtype) == ((5,), (1,), dtype)
    (_, packed) = loaded.called.pop()
    source, _, _, _, columns, at, sums, *_, form, _ = kernel_cuda.steps.entries[
        "finish"
    ].packer.unpack(packed)
    assert (source, columns, form) == (state.data_ptr(), 5, SumForm.CARRIED)
    assert (at, sums) == (carried.data_ptr(), zeros.data_ptr())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_planned_rounding_hands_its_launcher_what_round_does(loaded, monkeypatch, dtype):
    monkeypatch.setattr(kernel_cuda, "current_stream", lambda device: 4096)
    monkeypatch.setattr(kernel_cuda.steps, "_loaded", {})
    state, calls = torch.zeros(13, 5, dtype=torch.int64), []
    plan = kernel_cuda.plan_round(torch.zeros(10, dtype=dtype)[::2], ("whole", "backward"))
    for run in (lambda: kernel_cuda.round(state, dtype), lambda: plan(state), lambda: plan(state)):
        with trace() as launches:
            out = run()
        assert (out.shape, out.stride(), out.dtype) == ((5,), (1,), dtype)
        name, packed = loaded.called.pop()
        layout = kernel_cuda.steps.entries["finish"]
        names = [field for _, field in layout.fields]
        rest = dict(zip(names, layout.packer.unpack(packed), strict=True))
        assert (rest.pop("source"), rest.pop("sums")) == (state.data_ptr(), out.data_ptr())
        assert (rest["state"], rest["form"]) == (0, SumForm.ROUNDED)
        calls.append((name, rest, [(w.operator, w.direction, w.kernel) for w in launches]))
    assert calls[0] == (*calls[1][:2], [("", "", "exact_sum.finish")])
    assert calls[1] == calls[2] == (*calls[0][:2], [("whole", "backward", "exact_sum.finish")])
