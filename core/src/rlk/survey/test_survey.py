# SPDX-License-Identifier: Apache-2.0
"""Libraries that are right, wrong, absent and broken, and what is said of each."""

from dataclasses import replace

import pytest

from rlk.bench.variants import Peer
from rlk.errors import BackendError
from rlk.gates import cases, judge
from rlk.operator import FLOATS, Claim, Operator, Tensor, Workload
from rlk.survey import peers, values
from rlk.survey.peers import held_to
from rlk.test_support import tiny_operator


def oracle(x, weight, *, factor):
    peak = x.detach().abs().amax(-1)
    return x * peak[..., None] * weight * factor, peak


OPERATOR = tiny_operator(
    "surveyed",
    oracle=oracle,
    workloads=(Workload("somewhere", {"T": 131, "N": 33}),),
    claims=(
        Claim("repeatable", ("y", "peak", "dx", "dweight")),
        Claim("batch_invariant", ("y", "peak", "dx")),
        Claim("order_free", ("dweight",)),
        Claim("backend_equal", ("y", "peak", "dx", "dweight")),
    ),
)


def plain(told):
    """PyTorch's own operations; its sum over rows rounds at every step."""
    return lambda x, weight: oracle(x, weight, **told)[0]


def by_count(told):
    """As some libraries: another rounding where there are many rows."""
    more = 1 + 2.0**-20

    def call(x, weight):
        y = plain(told)(x, weight)
        return y * more if len(x) > 16 else y

    return call


def other(told):
    return lambda x, weight: x * weight


def broken(told):
    def call(x, weight):
        raise RuntimeError("no kernel\nfor this")

    return call


def forward_alone(told):
    return lambda x, weight: plain(told)(x, weight).detach()


PEERS = (
    Peer("plain", "torch", plain),
    Peer("by count", "torch", by_count),
    Peer("other", "torch", other),
    Peer("broken", "torch", broken),
    Peer("forward alone", "torch", forward_alone),
    Peer("absent", "no-such-distribution", plain),
)


@pytest.fixture(autouse=True)
def known_peers(monkeypatch):
    for module in (peers, values):
        monkeypatch.setattr(module, "peers_of", lambda operator: PEERS)


@pytest.fixture
def row():
    (place,) = values.places(OPERATOR, "float32", None, seed=1)
    return lambda name: values.survey(place, name)


def test_places_of_products_and_large_samples_have_rows_to_compare(monkeypatch):
    product = replace(OPERATOR, category="product")
    assert [place.rows for place in values.places(product, "float32", None, seed=1)] == [131]
    monkeypatch.setattr(values, "MOST_ELEMENTS", 40)
    (large,) = values.places(OPERATOR, "float32", None, seed=1)
    found = values.survey(large, "golden")
    assert (found.rows, found.batches) == (3, 1)


def test_places_of_one_input_and_outputs_of_two_widths_have_names_of_their_own():
    output = Tensor("y", ("...", "M"), ("=x",))
    operator = replace(
        OPERATOR,
        outputs=(output,),
        workloads=tuple(Workload(str(m), {"T": 9, "N": 33, "M": m}) for m in (33, 7)),
    )
    found = [place.label for place in values.places(operator, "float32", None, seed=1)]
    assert found == ["131x33 and 131x7", "131x33"]


def test_survey_of_our_backend_finds_nothing_that_depends_on_the_batch(row):
    found = row("golden")
    assert (found.verdict, found.ours, found.size) == ("measured", True, "131x33")
    assert found.rows_judged == 64
    assert found.rows_alone == found.batches_differing == {"y": 0, "dx": 0}
    assert found.order_free == {"dweight": True}
    assert found.accuracy.keys() == {"y", "dx", "dweight"}
    assert all(tensor.beyond == 0 for tensor in found.accuracy.values())


def test_survey_of_a_plain_sum_finds_that_its_dweight_follows_the_order(row):
    found = row("plain")
    assert (found.verdict, found.ours, found.version) == ("measured", False, PEERS[0].version())
    assert found.rows_alone == {"y": 0, "dx": 0}
    assert found.order_free == {"dweight": False}
    assert found.worst_gradient_ulp > 0


def test_survey_of_a_row_count_dependent_library_counts_its_rows(row):
    found = row("by count")
    assert found.verdict == "measured"
    assert 0 < found.rows_alone["y"] <= found.rows_judged
    # Batches of 2, 3, 7 and 16 rows differ from the whole; larger ones are computed alike.
    assert found.batches_differing["y"] == 4
    assert found.batches == 7


def test_survey_of_another_function_is_excluded_by_the_probe(row):
    found = row("other")
    assert found.verdict == "other function"
    assert "elements of y beyond the contract" in found.reason
    assert found.rows_judged is None


def test_survey_of_a_library_that_fails_or_is_absent_says_so(row):
    assert (row("broken").verdict, row("broken").reason) == (
        "failed",
        "RuntimeError: no kernel for this",
    )
    alone = row("forward alone")
    assert (alone.verdict, alone.reason) == (
        "not applicable",
        "forward alone has a forward alone",
    )
    absent = row("absent")
    assert absent.verdict == "not applicable"
    assert absent.reason == "it needs the package no-such-distribution, which is not installed"


def twice_a_sum(a, b):
    return (a + b) * 2, a + b


def test_survey_of_a_library_takes_terms_and_not_the_sum_that_stands_for_them(monkeypatch):
    rows = ("...", "N")
    summed = Operator(
        name="summed", package="none", bits_version=1, formula="y = 2 * (a + b)",
        inputs=(Tensor("a", rows, FLOATS, gradient="row"), Tensor("b", rows, ("=a",), "row")),
        scalars=(), outputs=(
            Tensor("y", rows, ("=a",)), Tensor("total", rows, ("=a",), sum_of=("a", "b")),
        ),
        saved=(), reductions=(), category="elementwise", claims=(),
        workloads=(Workload("somewhere", {"T": 20, "N": 8}),), oracle=twice_a_sum, backends=(),
    )  # fmt: skip
    others = (Peer("eager", "torch", lambda told: twice_a_sum),)
    for module in (peers, values):
        monkeypatch.setattr(module, "peers_of", lambda operator: others)
    (place,) = values.places(summed, "float32", None, seed=1)
    found = values.survey(place, "eager")
    assert (found.verdict, found.reason) == ("measured", None)
    assert found.rows_alone == {"y": 0, "total": 0, "da": 0, "db": 0}
    assert all(tensor.beyond == 0 for tensor in found.accuracy.values())


def test_survey_of_our_backend_that_breaks_ends_the_run(row, monkeypatch):
    def breaking(*arguments):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(values, "_measured", breaking)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        row("golden")


def judged(name, judgment):
    operator = held_to(OPERATOR, name)
    (case,) = (
        case
        for case in cases([operator], backend=name)
        if (case.judgment, case.dtype) == (judgment, "float32")
    )
    return {(r.tensor, r.config): r for r in judge(case)}


def status(records):
    return {record.status for record in records.values()}


def test_gate_of_a_row_count_dependent_library_is_red():
    found = judged("by count", "forward_invariance")
    assert "failed" in status(found)
    assert found["y", "chunked_7"].status == "failed"
    assert status(judged("plain", "forward_invariance")) == {"passed"}


def test_gate_of_a_library_judges_its_own_gradients():
    assert status(judged("plain", "forward_accuracy")) == {"passed"}
    assert status(judged("plain", "gradient_accuracy")) == {"passed"}
    found = judged("plain", "order_free")
    assert {tensor for tensor, _ in found} == {"dweight"}
    assert "failed" in status(found)
    # What ran is the library, and nothing of the sums that are formed for it.
    (record, *_) = found.values()
    assert record.provenance.actual == ["plain"]


def test_gate_of_a_library_that_is_unknown_names_those_there_are():
    with pytest.raises(
        BackendError, match="must be one of 'golden', 'plain', 'by count', .* got 'nobody'"
    ):
        held_to(OPERATOR, "nobody")
