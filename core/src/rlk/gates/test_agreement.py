# SPDX-License-Identifier: Apache-2.0
"""Bits that are claimed to be equal among some backends only."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rlk import backends
from rlk.cli.show import _guarantee
from rlk.gates import Candidate, Execution, Verdict, golden_hashes
from rlk.gates.agreement import against_hashes
from rlk.launch import record
from rlk.operator import FLOATS, Backend, Claim, Tensor

INPUTS = (
    Tensor("x", ("...", "N"), FLOATS, gradient="row"),
    Tensor("weight", ("N",), ("=x",)),
)
CLAIMS = (
    Claim("backend_equal", ("y",), among=("one", "two")),
    Claim("backend_equal", ("dx",)),
    Claim("gpu_to_gpu", ("dx",)),
)


def module(label, factor):
    """A backend that reports itself as `label` and multiplies y by `factor`."""

    def forward(x, weight):
        record(label, "scale_forward", "")
        return ((x.float() * weight.float() * factor).to(x.dtype),)

    def backward(dy, x, weight, *, needs):
        record(label, "scale_backward", "")
        return ((dy.float() * weight.float()).to(x.dtype),)

    return SimpleNamespace(forward=forward, backward=backward)


@pytest.fixture
def declared(scale):
    """The operator with y times these factors on two backends, and times 1 on golden."""

    def make(one=2.0, two=2.0, **fields):
        rows = [backends.golden(lambda: module("golden", 1.0))]
        for name, factor in (("one", one), ("two", two)):
            rows.append(Backend(name, lambda n=name, f=factor: module(n, f), ("cpu", "nvidia")))
        operator = scale.operator(inputs=INPUTS, claims=CLAIMS)
        return replace(operator, **{"backends": tuple(rows), **fields})

    return make


def red(records):
    return {(r.tensor, r.config_pair) for r in records if r.status == "failed"}


@pytest.mark.parametrize(("backend", "peer"), [("one", "two"), ("two", "one")])
def test_backend_equal_peers_are_compared_with_each_other_and_not_with_golden(
    scale, declared, backend, peer
):
    records = scale.records("backend_equal", declared(), backend=backend)
    assert red(records) == set()
    pairs = Counter((r.tensor, r.config_pair) for r in records)
    assert set(pairs) == {("y", peer), ("dx", "golden")}
    assert pairs["y", peer] == pairs["dx", "golden"] > 10


def test_backend_equal_peers_that_differ_are_red_where_the_claim_is(scale, declared):
    records = scale.records("backend_equal", declared(two=2.5), backend="one")
    assert red(records) == {("y", "two")}


def test_backend_equal_without_the_claim_golden_is_the_measure(scale, declared):
    operator = declared(claims=(Claim("backend_equal", ("y", "dx")),))
    assert red(scale.records("backend_equal", operator, backend="one")) == {("y", "golden")}


def test_backend_equal_peer_that_ran_other_code_is_red(scale, declared):
    operator = declared()
    two = Backend("two", lambda: module("one", 2.0), ("cpu", "nvidia"))
    operator = replace(operator, backends=(*operator.backends[:2], two))
    records = scale.records("backend_equal", operator, backend="one")
    assert red(records) == {("y", "two")}
    assert all("two was to run, ran one" in r.reason for r in records if r.status == "failed")


def test_backend_equal_peer_that_cannot_run_here_is_not_run_with_the_reason(scale, declared):
    two = Backend(
        "two", lambda: None, ("cpu", "nvidia"), missing=lambda platform: "it needs qubits"
    )
    operator = declared()
    operator = replace(operator, backends=(*operator.backends[:2], two))
    records = scale.records("backend_equal", operator, backend="one")
    (skipped,) = (r for r in records if r.status == "not_run")
    assert (skipped.config_pair, skipped.comparisons) == ("two", 0)
    assert "it needs qubits" in skipped.reason
    assert {r.tensor for r in records if r.status == "passed"} == {"dx"}


def test_against_hashes_golden_is_held_to_all_and_others_to_what_golden_shares(scale, declared):
    operator = declared()
    golden_hashes.write(operator)
    assert {r.tensor for r in scale.records("backend_equal", operator)} == {"y", "dx"}
    case = scale.case("gpu_to_gpu", operator, backend="one")
    candidate = Candidate(Execution(operator), "one", case.device)
    records = against_hashes(Verdict(case, candidate))
    assert {r.tensor for r in records} == {"dx"}
    assert red(records) == set()


def test_show_names_the_backends_of_a_claim():
    assert [_guarantee(claim) for claim in CLAIMS[:2]] == [
        "backend_equal among one, two",
        "backend_equal",
    ]
