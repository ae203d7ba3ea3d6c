# SPDX-License-Identifier: Apache-2.0
"""A trace lists what really ran, from every thread, and describes it by the code that ran."""

import contextlib
import hashlib
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

import rlk
from rlk.errors import PlatformError
from rlk.execution import Execution
from rlk.launch import Launch, launch_triton, operator_call, record, start_golden
from rlk.test_support import small_integers, tiny_operator

THIS_FILE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
execution = Execution(tiny_operator("tiny"))


def forward():
    x = small_integers(2, 3).requires_grad_()
    weight = small_integers(3).requires_grad_()
    arguments = execution.arguments((x, weight), {"factor": 1.0}, None)
    return execution.call(*arguments)[0]


def launched(kernel):
    return Launch("", "", "golden", kernel, "0")


def test_trace_forward_and_backward_are_listed_with_operator_and_direction():
    with rlk.trace() as launches:
        y = forward()
        forwards = len(launches)
        y.sum().backward()
    assert [(w.operator, w.direction, w.backend, w.kernel) for w in launches[:forwards]] == [
        ("tiny", "forward", "golden", "tiny_forward")
    ]
    assert {(w.operator, w.direction) for w in launches[forwards:]} == {("tiny", "backward")}
    kernels = [launch.kernel for launch in launches[forwards:]]
    assert kernels == ["tiny_backward", "exact_sum.add_rows", "exact_sum.round"]


def test_trace_launches_before_and_after_the_block_are_not_listed():
    record("golden", "before", "0")
    with rlk.trace() as launches:
        record("golden", "inside", "0")
    record("golden", "after", "0")
    assert launches == [launched("inside")]


def test_trace_backward_in_another_thread_is_listed():
    y = forward()
    with rlk.trace() as launches:
        thread = threading.Thread(target=lambda: y.sum().backward())
        thread.start()
        thread.join()
    assert launches[0] == Launch("tiny", "backward", "golden", "tiny_backward", "")


def test_trace_many_threads_lose_no_launch():
    start = threading.Barrier(8)

    def work(name):
        start.wait()
        for _ in range(100):
            record("golden", name, "0")

    with rlk.trace() as launches:
        threads = [threading.Thread(target=work, args=(str(i),)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    kernels = [launch.kernel for launch in launches]
    assert {name: kernels.count(name) for name in set(kernels)} == {str(i): 100 for i in range(8)}


def test_trace_two_open_ones_are_independent():
    with rlk.trace() as outer:
        record("golden", "a", "0")
        with rlk.trace() as inner:
            record("golden", "b", "0")
        record("golden", "c", "0")
    assert [launch.kernel for launch in outer] == ["a", "b", "c"]
    assert [launch.kernel for launch in inner] == ["b"]


def test_trace_equal_lists_close_by_identity():
    first, second = rlk.trace(), rlk.trace()
    one, other = first.__enter__(), second.__enter__()
    record("golden", "a", "0")
    assert one == other
    # The first to open closes first, while both hold the same.
    first.__exit__(None, None, None)
    record("golden", "b", "0")
    second.__exit__(None, None, None)
    record("golden", "c", "0")
    assert [launch.kernel for launch in one] == ["a"]
    assert [launch.kernel for launch in other] == ["a", "b"]


def test_trace_exception_closes_it_and_keeps_what_ran():
    launches = []

    def fail():
        with rlk.trace() as opened:
            launches.append(opened)
            record("golden", "a", "0")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    record("golden", "b", "0")
    assert launches == [[launched("a")]]


def test_trace_backend_that_fails_leaves_no_operator_behind():
    def fail():
        with operator_call("outer", "forward"):
            with operator_call("inner", "backward"):
                record("golden", "a", "0")
            record("golden", "b", "0")
            raise KeyError

    with rlk.trace() as launches:
        with pytest.raises(KeyError):
            fail()
        record("golden", "c", "0")
    assert [(launch.operator, launch.direction) for launch in launches] == [
        ("inner", "backward"), ("outer", "forward"), ("", ""),
    ]  # fmt: skip


def test_start_golden_source_is_named_by_its_digest():
    with rlk.trace() as launches:
        start_golden("fold", __file__)
    assert launches == [Launch("", "", "golden", "fold", THIS_FILE)]


def test_start_golden_flushed_subnormals_are_refused_and_not_recorded():
    if not torch.set_flush_denormal(True):
        pytest.skip("needs a processor that can flush subnormals")
    try:
        with rlk.trace() as launches, pytest.raises(PlatformError, match="subnormal"):
            start_golden("fold", __file__)
    finally:
        torch.set_flush_denormal(False)
    assert launches == []


class Kernel:
    """Stands for a Triton kernel; lists its launches as (grid, arguments, options)."""

    __name__ = "fold_kernel"
    fn = staticmethod(launched)

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.launches.append((grid, arguments, options))
            return SimpleNamespace(hash="hash of the binary")

        return launch


def test_launch_triton_in_the_interpreter_names_the_source():
    kernel, x = Kernel(), torch.zeros(3)
    with rlk.trace() as launches:
        launch_triton(kernel, (2, 1), 7, x, ROWS=16)
    assert kernel.launches == [((2, 1), (7, x), {"ROWS": 16})]
    assert launches == [Launch("", "", "triton", "fold_kernel (interpreter)", THIS_FILE)]


@pytest.mark.parametrize("grid", [(0,), (3, 0)])
def test_launch_triton_empty_grid_launches_nothing(grid):
    kernel = Kernel()
    with rlk.trace() as launches:
        launch_triton(kernel, grid, torch.zeros(3))
    assert (kernel.launches, launches) == ([], [])


def test_launch_triton_on_a_gpu_runs_on_its_tensors_device_without_contraction(monkeypatch):
    entered = []

    @contextlib.contextmanager
    def device(where):
        entered.append(where)
        yield
        entered.append("left")

    monkeypatch.setattr(torch.cuda, "device", device)
    with FakeTensorMode():
        x = torch.empty(3, device="cuda:1")
    kernel = Kernel()
    with rlk.trace() as launches:
        launch_triton(kernel, (2,), 7, x, ROWS=16)
    assert kernel.launches == [((2,), (7, x), {"enable_fp_fusion": False, "ROWS": 16})]
    assert entered == [1, "left"]
    assert launches == [Launch("", "", "triton", "fold_kernel", "hash of the binary")]
