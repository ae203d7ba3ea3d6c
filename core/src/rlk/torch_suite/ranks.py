# SPDX-License-Identifier: Apache-2.0
"""Processes with one process group, which run a function together on request."""

import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

RANKS = 2
# Seconds: a start on a loaded machine imports torch and DTensor; a task that hangs is a deadlock.
TIMEOUT = 120.0
# Seconds: how long a rank may go on after another one failed. It may be about to say why it failed,
# too, on a loaded machine.
GRACE = 10.0


class RankFailure(AssertionError):
    """A task failed on a rank, or did not end."""


class Ranks:
    """The processes; started at the first task, and again after one that hung."""

    def __init__(self, device: str, count: int = RANKS) -> None:
        self.device = device
        self.count = count
        self._folder = ""
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def run(self, task: Callable[..., None], *arguments: Any) -> None:
        """Call `task(device, *arguments)` on every rank.

        Raises:
            RankFailure: it raised on a rank, or a rank did not answer in time.
        """
        if not self._processes:
            self._start()
        failures = self._ask(pickle.dumps((task, arguments))) or self._answers()
        if failures:
            # The other rank may wait for this one in a collective.
            for process in self._processes:
                process.kill()
            self.close()
            # By rank: they answer in any order.
            raise RankFailure("\n".join(sorted(failures)))

    def _ask(self, message: bytes) -> list[str]:
        """The ranks that ended before they could be asked."""
        failures = []
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(message)
            except ConnectionError:
                failures.append(f"rank {rank}: the process ended")
        return failures

    def _answers(self) -> list[str]:
        """What failed, by rank."""
        end = time.monotonic() + TIMEOUT
        waiting = dict(enumerate(self._pipes))
        failures = []
        while waiting:
            ready = connection.wait(list(waiting.values()), max(0.0, end - time.monotonic()))
            if not ready:
                failures += [f"rank {rank}: no answer" for rank in waiting]
                break
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                failure = _answer(waiting.pop(rank))
                if failure is not None:
                    failures.append(f"rank {rank}: {failure}")
                    end = min(end, time.monotonic() + GRACE)
        return failures

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.mkdtemp(prefix="rlk-ranks-")
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.count, self.device, self._folder, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _answer(pipe: Any) -> str | None:
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionError):
        return "the process ended"


def _serve(rank: int, count: int, device: str, folder: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    # No network is needed: loopback, and a file where the ranks meet.
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=(Path(folder) / "store").as_uri(),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=TIMEOUT),
    )
    while True:
        try:
            task, arguments = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            break
        failure = None
        try:
            task(device, *arguments)
        except BaseException:  # noqa: BLE001 - whatever it is, the test shows it
            failure = traceback.format_exc()
        pipe.send_bytes(pickle.dumps(failure))
    dist.destroy_process_group()
