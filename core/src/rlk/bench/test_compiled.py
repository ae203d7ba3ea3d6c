# SPDX-License-Identifier: Apache-2.0
"""What is compiled ahead is what will be measured."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rlk.bench import compiled, measure, variants
from rlk.bench.work import works
from rlk.operator import FLOATS, Operator, Tensor, Workload

DEMO = Operator(
    name="demo", package="rlk_test", bits_version=1, formula="y = x * weight",
    inputs=(
        Tensor("x", ("...", "N"), FLOATS, gradient="row"),
        Tensor("weight", ("N",), ("=x",), gradient="parameter"),
    ),
    scalars=(), outputs=(Tensor("y", ("...", "N"), ("=x",)),), saved=(), reductions=(),
    category="elementwise", claims=(), workloads=(Workload("somewhere", {"T": 10, "N": 8}),),
    oracle=lambda x, weight: (x * weight,), backends=(),
)  # fmt: skip


class InThisProcess(ThreadPoolExecutor):
    """A pool whose one worker is a thread, where the operator of these tests is known."""

    def __init__(self, jobs, context, start):
        super().__init__(1)


@pytest.fixture
def seen(monkeypatch, eager_clock):
    """Calls of what would be compiled: the shape, and whether gradients are recorded."""
    found = []

    def noted(call):
        def run(*tensors):
            found.append((tensors[0].shape, torch.is_grad_enabled()))
            return call(*tensors)

        return run

    monkeypatch.setattr(compiled, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(compiled.registry, "find", lambda name: DEMO)
    monkeypatch.setattr(torch, "compile", lambda call, **told: noted(call))
    return found


def test_every_size_is_compiled_as_it_is_measured(seen):
    planned = works(DEMO, torch.bfloat16, [3])
    compiled.side_by_side(planned, 2)
    ahead = set(seen)
    seen.clear()
    for work in planned:
        call = variants.compiled_peer(DEMO).make(work.scalars())
        sets = measure.Sets(work)
        sets.forward(call, False)(0)
        sets.backward(call, None)(0)
    assert ahead == set(seen)
    assert len(ahead) == 2 * len(planned)


def test_backward_is_compiled_for_a_graph_that_is_kept_as_it_is_measured(seen, monkeypatch):
    kept = []
    gradients = torch.autograd.grad

    def noted(*tensors, retain_graph=False):
        kept.append(retain_graph)
        return gradients(*tensors, retain_graph=retain_graph)

    monkeypatch.setattr(torch.autograd, "grad", noted)
    (work,) = works(DEMO, torch.bfloat16, [])
    compiled.side_by_side([work], 1)
    measure.Sets(work).backward(variants.compiled_peer(DEMO).make(work.scalars()), None)(0)
    assert kept == [True, True]


def test_size_that_does_not_compile_is_left_to_who_measures_it(seen, monkeypatch):
    def refused(call, **told):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", refused)
    compiled.side_by_side(works(DEMO, torch.float32, []), 2)
    assert seen == []
