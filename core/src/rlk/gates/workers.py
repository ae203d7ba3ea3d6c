# SPDX-License-Identifier: Apache-2.0
"""Cases judged side by side, each in one of several processes."""

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import fields
from pathlib import Path
from typing import Any

from rlk import gates, interpreter, registry
from rlk.errors import RlkError
from rlk.gates.case import Case
from rlk.gates.record import Record


def judged(planned: Sequence[Case], dump: Path | None, jobs: int) -> Iterator[list[Record]]:
    """The records of each case in the order of the plan.

    Args:
        planned: cases of installed operators.
        dump: as for `gates.judge`.
        jobs: how many processes judge; 1 judges in this one.
    Returns:
        One list for each case. An interrupt ends the iteration by KeyboardInterrupt once the
        records of all finished cases have been handed out.
    Raises:
        RlkError: a process ended before its case did.
    """
    if jobs == 1:
        yield from (gates.judge(case, dump=dump) for case in planned)
        return
    # Spawned: a process forked after CUDA has started could not use it.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(planned)), context, start)
    waiting: list[Future[list[Record]]] = []
    yielded = 0
    try:
        waiting = _handed_to(pool, planned, dump)
        while waiting:
            found = waiting[0].result()
            del waiting[0]
            yielded += 1
            yield found
    except KeyboardInterrupt:
        yield from (future.result() for future in waiting if _has_finished(future))
        raise
    except BrokenProcessPool:
        case = planned[yielded]
        raise RlkError(
            "gate: a process must live until its case ends, got one that ended at or after "
            f"{case.identity}; judge it alone: {case.repro}"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def start() -> None:
    """Begin a process that judges."""
    # The user's interrupt reaches every process: a worker ends without a traceback of its own.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    interpreter.enable_without_gpu()


def _handed_to(
    pool: ProcessPoolExecutor, planned: Sequence[Case], dump: Path | None
) -> "list[Future[list[Record]]]":
    try:
        return [pool.submit(_judge, case.operator.name, _rest(case), dump) for case in planned]
    except RuntimeError as error:
        # A process has ended. A pool that is just finding out may say that it is shut down.
        raise BrokenProcessPool(str(error)) from error


def _rest(case: Case) -> dict[str, Any]:
    """What a case is beside its operator, which no process can hand to another."""
    return {f.name: getattr(case, f.name) for f in fields(case) if f.name != "operator"}


def _judge(name: str, rest: dict[str, Any], dump: Path | None) -> list[Record]:
    return gates.judge(Case(registry.find(name), **rest), dump=dump)


def _has_finished(future: "Future[list[Record]]") -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
