# SPDX-License-Identifier: Apache-2.0
"""Times and memory, with stand-ins for a GPU's clock and its allocator."""

import gc
import weakref

import torch

from rlk.bench import timing


class Clock:
    """An event of a clock that each eager call moves on by 1/8 ms."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Clock.now

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return end.at - self.at


def test_eager_time_is_that_of_calls_in_a_row_on_sets_in_turn(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    used = []

    def step(i):
        used.append(i)
        Clock.now += 0.125

    assert timing.eager_us(step, 3) == 125.0
    assert used == [i % 3 for i in range(len(used))]
    assert len(used) == 3 + timing.WARM_UP + timing.EAGER_ROUNDS * timing.EAGER_CALLS


class Cycle:
    """Memory that only a collection of garbage frees."""

    def __init__(self):
        self.itself = self


def test_peak_bytes_garbage_of_earlier_work_is_no_memory_of_the_call(monkeypatch):
    # 100 bytes a cycle; the peak is what lives when a call has collected garbage.
    peak = []
    held = weakref.WeakSet()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100 * len(held))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", peak.clear)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: max(peak))

    def call():
        gc.collect()
        result = Cycle()
        held.add(result)
        peak.append(100 * len(held))
        return result

    gc.disable()
    try:
        # The results of the warm call are the garbage.
        found, result = timing.peak_bytes(call)
    finally:
        gc.enable()
    assert (found, list(held)) == (100, [result])


def test_extra_bytes_count_memory_that_results_share_once(monkeypatch):
    shared, own = torch.ones(8), torch.ones(4)
    monkeypatch.setattr(timing, "peak_bytes", lambda call: (100, call()))
    assert timing.extra_bytes(lambda: (shared, shared.view(2, 4), own)) == 100 - 32 - 16


def test_timing_constants_let_a_replay_outlast_its_start():
    assert timing.FEWEST < timing.MOST
    assert timing.REPLAY_US / timing.MOST >= 10
