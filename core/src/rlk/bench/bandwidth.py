# SPDX-License-Identifier: Apache-2.0
"""The floor: the same streams of memory, read and written by a kernel that does nothing else."""

import ctypes
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlk.bench.timing import Capture, Time, interleaved
from rlk.bench.work import ROTATED_BYTES, Work
from rlk.cuda.header import Layout, library_header
from rlk.cuda.launch import binary_for

MOST_STREAMS = 4
WORD_BYTES = 16
_LAYOUT = Layout(
    "BandwidthMove",
    (
        *(("const void*", f"read{i}") for i in range(MOST_STREAMS)),
        *(("void*", f"write{i}") for i in range(MOST_STREAMS)),
        ("long long", "words"),
        ("void*", "stream"),
        ("int", "reads"),
        ("int", "writes"),
        ("int", "unroll"),
        ("int", "blocks"),
        ("int", "device"),
    ),
)
SOURCE = Path(__file__).with_name("kernel_bandwidth.cu")
GENERATED = {"rlk_bandwidth.h": library_header("bandwidth", (("move", _LAYOUT),))}
UNROLLS = (1, 2, 4, 8)
# 16: blocks of a processor for the variants whose blocks stay; 0 is one block for each tile.
RESIDENT = 16


@dataclass(frozen=True)
class Floor:
    """What the probe reached: time of the streams alone, and their bytes in that time."""

    time: Time
    bytes: int
    kernel: str

    @property
    def terabytes_per_second(self) -> float:
        """The bandwidth."""
        return self.bytes / self.time.median / 1e6

    def us(self, least_bytes: int) -> float:
        """The least time for so many bytes at this bandwidth."""
        return least_bytes / self.bytes * self.time.median


def floor(work: Work, direction: str, stream: Any) -> Floor:
    """The fastest of several ways to move the streams of one direction."""
    reads, writes = work.streams(direction)
    size = -(-work.most_bytes // WORD_BYTES) * WORD_BYTES
    streams = reads + writes
    sets = max(2, min(work.sets, math.ceil(ROTATED_BYTES / size)))
    memory = [
        # Random: moving zeros takes less power and may be faster.
        [torch.randint(256, (size,), dtype=torch.uint8, device="cuda") for _ in range(streams)]
        for _ in range(sets)
    ]
    device = torch.cuda.current_device()
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    library = binary_for("bandwidth", SOURCE, GENERATED, device)
    launch = library.function("rlk_bandwidth_move", [ctypes.c_char_p])

    def step(unroll: int, blocks: int) -> Any:
        def run(i: int) -> None:
            pointers = [t.data_ptr() for t in memory[i]]
            read = pointers[:reads] + [0] * (MOST_STREAMS - reads)
            write = pointers[reads:] + [0] * (MOST_STREAMS - writes)
            current = torch.cuda.current_stream(device).cuda_stream
            packed = _LAYOUT.packer.pack(
                *read, *write, size // WORD_BYTES, current, reads, writes, unroll, blocks, device
            )
            library.check(launch(packed), "the bandwidth probe")

        return run

    total = size * streams
    captures = {
        f"unroll {unroll}, {'resident' if blocks else 'tiled'}": Capture(
            step(unroll, blocks), sets, total / 4e6, stream
        )
        for unroll in UNROLLS
        for blocks in (0, RESIDENT * processors)
    }
    times = interleaved(captures)
    fastest = min(times, key=lambda name: times[name].median)
    return Floor(times[fastest], total, fastest)
