# SPDX-License-Identifier: Apache-2.0
"""A candidate whose gate is red, and a library that computes something else, get no time."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlk.bench import measure, refusals, variants
from rlk.bench.work import works
from rlk.errors import RlkError
from rlk.execution import Execution
from rlk.launch import record
from rlk.operator import FLOATS, Backend, Claim, Operator, Tensor, Workload
from rlk.survey import peers, values

NOTHING: frozenset[str] = frozenset()


def module(label, double):
    """A backend of y = 2 * x that reports itself as `label`."""

    def forward(x):
        record(label, "double_forward", "")
        return (double(x),)

    def backward(dy, x, *, needs=NOTHING):
        record(label, "double_backward", "")
        return (dy + dy,)

    return SimpleNamespace(forward=forward, backward=backward)


def by_count(x):
    """The planted fault: another result where there are many rows."""
    return (x + x) * 1.25 if len(x) > 16 else x + x


RIGHT = Backend("triton", lambda: module("triton", lambda x: x + x), ("cpu",))
FAULTY = Backend("cuda", lambda: module("cuda", by_count), ("cpu",))
OPERATOR = Operator(
    name="refused", package="none", bits_version=1, formula="y = 2 * x",
    inputs=(Tensor("x", ("...", "N"), FLOATS, gradient="row"),), scalars=(),
    outputs=(Tensor("y", ("...", "N"), ("=x",)),), saved=(), reductions=(),
    category="elementwise", claims=(Claim("batch_invariant", ("y", "dx")),),
    workloads=(Workload("somewhere", {"T": 40, "N": 33}),), oracle=lambda x: (x + x,),
    backends=(RIGHT, FAULTY),
)  # fmt: skip
PEERS = (
    variants.Peer("other", "torch", lambda told: lambda x: x * x),
    variants.Peer("same", "torch", lambda told: lambda x: x * 2),
)


@pytest.fixture(autouse=True)
def everyone_runs_here(monkeypatch, eager_clock):
    """Nobody needs a GPU: who has no time was refused."""
    for used_in in (peers, values):
        monkeypatch.setattr(used_in, "peers_of", lambda operator: PEERS)
    monkeypatch.setattr(refusals, "timed_peers", lambda operator: PEERS)
    monkeypatch.setattr(variants, "_peers", lambda operator: PEERS)
    monkeypatch.setattr(variants, "compiled_peer", lambda operator: PEERS[1])
    execution = Execution(OPERATOR)

    def ours(operator, backend, told):
        call = lambda x: execution.call(*execution.arguments((x,), {}, backend))[0]  # noqa: E731
        return variants.Variant(backend, "", call, ours=True)

    monkeypatch.setattr(variants, "_ours", ours)


def test_candidate_with_a_red_gate_gets_no_time():
    refused = refusals.refusals(OPERATOR, "float32")
    assert refused.keys() == {"cuda", "other"}
    assert refused["cuda"][0] == "failed"
    assert refused["cuda"][1].startswith("its gate is red: forward_accuracy of y, ")
    (work,) = works(OPERATOR, torch.float32, [])
    rows = {row.variant: row for row in measure.measure(work, refused)}
    for name, verdict in (("cuda", "failed"), ("other", "other function")):
        assert rows[name].verdict == verdict
        times = ("forward_us", "backward_us", "both_us", "eager_us", "host_us", "peer_ratio")
        assert [getattr(rows[name], time) for time in times] == [None] * len(times)
    assert rows["triton"].forward_us == rows["same"].forward_us == 30.0


def test_candidate_without_the_fault_is_measured():
    right = Backend("cuda", lambda: module("cuda", lambda x: x + x), ("cpu",))
    assert refusals.refusals(replace(OPERATOR, backends=(right,)), "float32").keys() == {"other"}


def test_operators_judged_side_by_side_are_found_anew_by_each_process():
    with pytest.raises(RlkError, match="got 'refused'"):
        refusals.side_by_side([(OPERATOR, "float32")], 2)


class InThisProcess(ThreadPoolExecutor):
    """A pool whose one worker is a thread, where the operator of these tests is known."""

    def __init__(self, jobs, context, start):
        super().__init__(1)


def test_operators_judged_side_by_side_are_refused_as_one_by_one(monkeypatch):
    monkeypatch.setattr(refusals, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(refusals.registry, "find", lambda name: OPERATOR)
    wanted = [(OPERATOR, "float32"), (OPERATOR, "bfloat16")]
    assert refusals.side_by_side(wanted, 2) == [refusals.refusals(*pair) for pair in wanted]
