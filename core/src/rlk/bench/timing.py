# SPDX-License-Identifier: Apache-2.0
"""Time on the GPU by graph replay, variants taking turns; time on the host; memory."""

import gc
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

# 4 ms: what one replay lasts at least, so that starting it does not show.
REPLAY_US = 4000.0
FEWEST, MOST = 8, 400
WARM_UP = 3
ROUNDS = 15
# Eager calls over which the host's time is taken.
HOST_CALLS = 100
# Eager calls that follow each other between two events.
EAGER_CALLS = 50
EAGER_ROUNDS = 5
# 256 MB: written before each replay, so that nothing of it lies in the L2 cache.
FLUSH_BYTES = 256_000_000

Step = Callable[[int], Any]
Name = TypeVar("Name")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Time:
    """Microseconds of one call: median, and half the distance of the quartiles."""

    median: float
    spread: float

    @staticmethod
    def of(samples: list[float]) -> "Time":
        """The statistics of some samples."""
        low, middle, high = statistics.quantiles(samples, n=4)
        return Time(middle, (high - low) / 2)


class Capture:
    """A graph of calls, each on the next set of tensors, whose results take turns too."""

    def __init__(self, step: Step, sets: int, floor_us: float, stream: Any) -> None:
        wanted = min(MOST, max(FEWEST, REPLAY_US / max(floor_us, 1.0)))
        self.calls = sets * max(1, round(wanted / sets))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for i in range(WARM_UP):
                step(i % sets)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            # Results that are kept force later ones to other memory.
            kept: deque[Any] = deque(maxlen=sets)
            for i in range(self.calls):
                kept.append(step(i % sets))
        # A replay reads and writes this memory.
        self._kept = step, kept

    def replay_us(self) -> float:
        """Microseconds of one call in one replay."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / self.calls


def interleaved(captures: Mapping[Name, Capture]) -> dict[Name, Time]:
    """The time of each capture: in every round each is replayed once, after a flush."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    samples: dict[Name, list[float]] = {name: [] for name in captures}
    for capture in captures.values():
        capture.replay_us()
    for _ in range(ROUNDS):
        for name, capture in captures.items():
            flush.zero_()
            samples[name].append(capture.replay_us())
    return {name: Time.of(found) for name, found in samples.items()}


def host_us(call: Callable[[], Any]) -> float:
    """Median microseconds that an eager call keeps the host while the GPU is idle."""
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(HOST_CALLS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        results = call()
        times.append(time.perf_counter() - start)
        # A caller keeps them, and with them what autograd recorded.
        del results
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def eager_us(step: Step, sets: int) -> float:
    """Median microseconds of a call among eager ones in a row, whoever is slower, host or GPU."""
    # Results take turns too, as those of a capture.
    kept: deque[Any] = deque(maxlen=sets)
    turns = itertools.cycle(range(sets))
    for _ in range(sets + WARM_UP):
        kept.append(step(next(turns)))
    times = []
    for _ in range(EAGER_ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(EAGER_CALLS):
            kept.append(step(next(turns)))
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / EAGER_CALLS)
    return statistics.median(times)


def extra_bytes(call: Callable[[], Any]) -> int:
    """The most memory a call holds beyond what it returns."""
    peak, results = peak_bytes(call)
    return peak - held_bytes(results)


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of their memory, which some may share: terms of a sum have one gradient."""
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


def peak_bytes(call: Callable[[], Result]) -> tuple[int, Result]:
    """The most memory a warm call holds beyond what was allocated before it, and its results."""
    call()
    # Garbage that was freed during the call would be taken off what it holds.
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, results
