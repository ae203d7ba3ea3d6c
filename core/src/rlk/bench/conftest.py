# SPDX-License-Identifier: Apache-2.0
"""The whole measurement on the CPU, with a clock that stands in for a GPU's."""

import pytest
import torch

from rlk.bench import bandwidth, measure
from rlk.bench.timing import Time
from rlk.bench.work import Work
from rlk.parts import tensors_in


class EagerCapture:
    """Runs the step once for each set."""

    def __init__(self, step, sets, floor_us, stream):
        self.results = [step(i) for i in range(sets)]

    def replay_us(self):
        return 10.0


def host_us(call):
    """Longer where gradients are recorded."""
    return 30.0 if any(t.requires_grad for t in tensors_in(call())) else 20.0


@pytest.fixture
def eager_clock(monkeypatch):
    """Everything but the clock, the memory counter and the probe, on the CPU."""
    monkeypatch.setattr(measure, "DEVICE", "cpu")
    monkeypatch.setattr(measure, "Capture", EagerCapture)
    monkeypatch.setattr(measure, "interleaved", lambda found: dict.fromkeys(found, Time(30.0, 1.0)))
    monkeypatch.setattr(measure, "extra_bytes", lambda call: (call(), 2**21)[1])
    monkeypatch.setattr(measure, "host_us", host_us)
    monkeypatch.setattr(measure, "eager_us", lambda step, sets: (step(sets - 1), 25.0)[1])
    floor = bandwidth.Floor(Time(10.0, 0.5), 1_000_000, "unroll 4, tiled")
    monkeypatch.setattr(bandwidth, "floor", lambda work, direction, stream: floor)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.enable_grad())
    monkeypatch.setattr(Work, "sets", 2)
