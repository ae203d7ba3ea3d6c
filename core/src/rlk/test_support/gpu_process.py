# SPDX-License-Identifier: Apache-2.0
"""An operator among other work of a process on a GPU: a graph, threads on streams, the host."""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rlk.test_support.fresh_process import run_python
from rlk.test_support.on_gpu import assert_equal_bits

THREADS = 8
REPEATS = 20
# Calls over which the host's time is taken.
CALLS = 300


def assert_passes_in_fresh_process(program: str, *arguments: object) -> None:
    """Assert that a program ends well which finds the modules that this process finds."""
    done = run_python("-c", program, *arguments, folders=filter(None, sys.path))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def assert_replays_have_eager_bits(
    call: Callable[[], Sequence[torch.Tensor]],
    given: Iterable[torch.Tensor],
    values: Callable[..., torch.Tensor],
) -> None:
    """Assert that a captured call, replayed on other values, has the bits of an eager one.

    Args:
        call: captured when it is first called, and called again at the end.
        given: the tensors that it reads.
        values: makes values of a shape, others each time.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = call()
    with torch.no_grad():
        for tensor in given:
            tensor.copy_(values(*tensor.shape))
    for _ in range(3):
        for tensor in captured:
            tensor.detach().fill_(7)
        graph.replay()
    for place, (found, eager) in enumerate(zip(captured, call(), strict=True)):
        assert_equal_bits(found.detach(), eager.detach(), f"result {place}")


def assert_threads_have_bits_of_one(
    run: Callable[[Any], Any], calls: Sequence[Any], compare: Callable[[Any, Any], None]
) -> None:
    """Assert that calls, each by a thread on a stream of its own, have the results of one thread.

    Args:
        run: the results of a call.
        calls: one for each thread, which repeats it.
        compare: asserts that results are the expected ones.
    """
    expected = [run(call) for call in calls]
    torch.cuda.synchronize()
    together = threading.Barrier(len(calls))

    def work(call: Any) -> list[Any]:
        stream = torch.cuda.Stream()
        together.wait()
        with torch.cuda.stream(stream):
            runs = [run(call) for _ in range(REPEATS)]
        stream.synchronize()
        return runs

    with ThreadPoolExecutor(len(calls)) as pool:
        for runs, single in zip(pool.map(work, calls), expected, strict=True):
            for found in runs:
                compare(found, single)


def report_host_time(
    call: Callable[[], Any], what: str, record_property: Callable[[str, object], None]
) -> None:
    """Print and record the median time for which an eager call keeps the host."""
    for _ in range(REPEATS):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    median = sorted(times)[CALLS // 2] * 1e6
    record_property("host_us", median)
    print(f"{what}: {median:.1f} us on the host")
    assert median > 0, what
