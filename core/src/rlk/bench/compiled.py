# SPDX-License-Identifier: Apache-2.0
"""What torch.compile makes of each size, side by side, before one is timed.

Its results stay in its cache on disk. The process that measures finds them there, where each would
take it seconds.
"""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from rlk import registry
from rlk.bench import measure
from rlk.bench.variants import compiled_peer
from rlk.bench.work import Work
from rlk.gates.workers import start
from rlk.parts import cut_like, tensors_in


def side_by_side(works: Sequence[Work], jobs: int) -> None:
    """Compile forward and backward of each, in processes that have ended when this returns.

    Args:
        works: of installed operators.
        jobs: how many processes.
    """
    # Spawned: a process forked after CUDA has started could not use it.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(works)), context, start) as pool:
        waiting = [
            pool.submit(
                _compile, w.operator.name, w.site, w.sizes, w.dtype, w.arguments, layout=w.layout
            )
            for w in works
        ]
        for future in waiting:
            future.result()


def _compile(name: str, *described: Any, **layout: Any) -> None:
    work = Work(registry.find(name), *described, **layout)
    inputs = work.inputs(0, measure.DEVICE)
    try:
        call = compiled_peer(work.operator).make(work.scalars())
        with torch.no_grad():
            call(*inputs)
        results = tensors_in(call(*inputs))
        upstream = cut_like(work.upstream(0, measure.DEVICE), results)
        # Kept, as where it is measured: otherwise the code may write to what autograd keeps.
        torch.autograd.grad(results, measure.wanted_of(inputs), upstream, retain_graph=True)
    except Exception:  # noqa: BLE001 - who measures it meets the same, and says so in its row
        return
