# SPDX-License-Identifier: Apache-2.0
"""One case, whatever happens in it: at least one record, and never a pass that nothing earned."""

import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from rlk import backends, gates, registry
from rlk.errors import RlkError
from rlk.gates import Record, cases, judge, summarise
from rlk.gates.record import SCHEMA
from rlk.gates.repeatable import digests
from rlk.gates.transforms import SAMPLE_ORDER
from rlk.launch import record
from rlk.operator import Backend

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


def statuses(records: list[Record]) -> set[tuple[str, str]]:
    return {(r.tensor, r.status) for r in records}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("judgment", "counts"),
    [
        ("forward_accuracy", {"y": 1}),
        ("gradient_accuracy", {"dx": 1, "dweight": 1}),
        # 13 configurations: 12 pairs with the canonical one.
        ("forward_invariance", {"y": 12}),
        # chunked, permuted and two paddings; all singletons, whole and chunked.
        ("gradient_invariance", {"dx": 12, "dweight": 4 + 2}),
        # 3 permutations, chunks of 1, 7 and 64, zero padding.
        ("order_free", {"dweight": 7}),
        # Four layouts of inputs and of gradients, the expanded one, ownership of 1 and 7 rows.
        ("layout", {"y": 11, "dx": 11, "dweight": 11, "x": 2, "weight": 2, "dy": 2}),
        # The sign (no sum's), three bad rows with neighbours, no rows.
        ("special_values", {"y": 8, "dx": 8, "dweight": 4}),
    ],
)
def test_judge_right_operator_passes_with_the_published_counts(scale, judgment, counts, dtype):
    records = scale.records(judgment, dtype=dtype)
    assert [r.reason for r in records if r.status != "passed"] == []
    assert Counter(r.tensor for r in records) == counts
    assert all(r.comparisons > 0 for r in records)


def test_gradient_invariance_parameter_pairs_are_the_named_ones(scale):
    records = scale.records("gradient_invariance")
    order = "_".join(map(str, SAMPLE_ORDER))
    assert [r.config for r in records if r.tensor == "dweight"] == [
        "chunked_7",
        f"permuted_{order}",
        "right_padded_20",
        "left_padded_20",
        "all_singletons",
        "all_singletons_chunked_7",
    ]


def test_judge_judgment_without_records_is_red(scale, monkeypatch):
    monkeypatch.setitem(gates._JUDGES, "layout", lambda verdict: [])
    (empty,) = scale.records("layout")
    assert (empty.status, empty.reason) == ("failed", "nothing was judged")


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyError("boom"), AssertionError("boom")])
def test_judge_backend_that_raises_fails_its_case_alone(scale, error):
    def backward(*tensors, **options):
        raise error

    operator = scale.operator(backward=backward)
    (failed,) = scale.records("gradient_accuracy", operator)
    assert (failed.tensor, failed.status) == ("", "failed")
    assert failed.reason.startswith(f"{type(error).__name__}: ")


def test_judge_backend_that_cannot_load_is_red(scale):
    def load():
        raise RuntimeError("the extension has ABI version 3, expected 4")

    operator = scale.operator(row=lambda _: backends.golden(load))
    (failed,) = scale.records("layout", operator)
    assert failed.status == "failed"
    assert "ABI version 3" in failed.reason


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            Backend("golden", lambda: None, ("cpu",), missing=lambda platform: "it needs qubits"),
            "it needs qubits",
        ),
        (Backend("golden", lambda: None, ("nvidia",)), "the device must be an NVIDIA GPU, got cpu"),
    ],
)
def test_judge_backend_that_cannot_run_here_is_not_run(scale, row, reason):
    (skipped,) = scale.records("layout", scale.operator(row=lambda _: row))
    assert (skipped.status, skipped.comparisons) == ("not_run", 0)
    assert reason in skipped.reason


@NO_GPU
def test_judge_gpu_to_gpu_without_a_gpu_is_not_run(scale):
    operator = scale.operator(row=lambda load: Backend("other", load, ("cpu",)))
    (skipped,) = scale.records("gpu_to_gpu", operator, backend="other")
    assert (skipped.status, skipped.provenance.actual) == ("not_run", [])
    assert skipped.reason.startswith("it needs an NVIDIA GPU")


def test_provenance_backend_under_another_name_turns_every_record_red(scale):
    operator = scale.operator(row=lambda load: Backend("other", load, ("cpu", "nvidia")))
    for judgment in ("forward_accuracy", "forward_invariance", "order_free", "special_values"):
        records = scale.records(judgment, operator, backend="other")
        judged = [r for r in records if r.config != "no_rows"]
        assert {r.status for r in judged} == {"failed"}
        assert all("requested other, ran golden" in r.reason for r in judged)
        assert judged[0].provenance.requested == "other"
        assert judged[0].provenance.actual == ["golden"]


def test_provenance_operator_that_reports_nothing_is_red(scale):
    def forward(x, weight):
        return ((x.float() * weight.float()).to(x.dtype),)

    for judgment, covered in (
        ("forward_accuracy", "launches cover [], not forward"),
        ("gradient_accuracy", "launches cover ['backward'], not forward and backward"),
    ):
        records = scale.records(judgment, scale.operator(forward=forward))
        assert {r.status for r in records} == {"failed"}
        assert all(covered in r.reason for r in records)


def test_provenance_second_backend_beside_the_first_is_red(scale):
    def forward(x, weight):
        record("other", "scale_forward", "")
        return scale.forward(x, weight)

    (mixed,) = scale.records("forward_accuracy", scale.operator(forward=forward))
    assert mixed.status == "failed"
    assert "requested golden, ran golden, other" in mixed.reason


def test_provenance_right_operator_names_kernels_and_binaries(scale):
    provenance = scale.records("gradient_accuracy")[0].provenance
    assert {"scale_forward", "scale_backward"} <= set(provenance.kernels)
    alone = scale.records("forward_accuracy")[0].provenance
    assert alone.kernels == ["scale_forward"]
    assert all(len(binary) == 64 for binary in provenance.binaries)
    assert (provenance.device, provenance.weights) == ("cpu", "synthetic")


def test_bits_tensors_without_elements_are_red(scale):
    verdict = gates.Verdict(scale.case("layout"), SimpleNamespace(launches=[], device="cpu"))
    nothing = torch.empty(0, 8)
    compared = verdict.bits("y", nothing, nothing, config="", pair=None, runs=())
    assert (compared.status, compared.reason) == ("failed", "nothing was compared")


@pytest.mark.parametrize(("allowed", "status"), [(False, "failed"), (True, "passed")])
def test_bits_nothing_finite_is_red_unless_that_is_the_question(scale, allowed, status):
    verdict = gates.Verdict(scale.case("layout"), SimpleNamespace(launches=[], device="cpu"))
    nan = torch.full((2,), float("nan"))
    compared = verdict.bits("y", nan, nan, config="", pair=None, runs=(), nan_alone=allowed)
    assert compared.status == status


def test_bits_zeros_of_other_sign_are_red_with_their_place(scale):
    verdict = gates.Verdict(scale.case("layout"), SimpleNamespace(launches=[], device="cpu"))
    zeros = torch.zeros(2, 3)
    other = zeros.clone()
    other[1, 2] = -0.0
    compared = verdict.bits("y", other, zeros, config="", pair=None, runs=())
    assert (compared.status, compared.first_mismatch.index) == ("failed", [1, 2])
    assert (compared.first_mismatch.count, compared.max_abs_error) == (1, 0.0)


def test_repro_other_seed_and_tier_repeat_the_same_case(scale):
    (case,) = cases([scale.operator()], tier="full", seed=5, identity="scale/golden/layout/float16")
    assert case.repro == "rlk gate --case scale/golden/layout/float16 --seed 5 --tier full"
    records = judge(case)
    assert {r.repro for r in records} == {case.repro}
    assert scale.case("layout").repro == "rlk gate --case scale/golden/layout/float32 --seed 2026"


def test_cases_unknown_name_is_refused_with_an_example(scale):
    with pytest.raises(RlkError, match="backend must be one of 'golden', got 'cuda'"):
        cases([scale.operator()], backend="cuda")
    with pytest.raises(RlkError, match="like scale/golden/forward_accuracy/float32, got 'scale'"):
        cases([scale.operator()], identity="scale")


def test_cases_unclaimed_word_is_not_planned(scale):
    claimed = {c.judgment for c in cases([scale.operator()])}
    unclaimed = {c.judgment for c in cases([scale.operator(claims=())])}
    assert claimed - unclaimed == {"repeatable", "order_free", "backend_equal"}


def test_judge_failing_case_dumps_inputs_and_results(scale, tmp_path):
    def forward(x, weight):
        return (scale.forward(x, weight)[0] * 0.0,)

    judge(scale.case("layout"), dump=tmp_path / "green")
    assert not (tmp_path / "green").exists()

    def backward(dy, x, weight, *, needs):
        dx, state = scale.backward(dy, x, weight, needs=needs)
        return None if dx is None else dx * 0.0, state

    wrong = scale.operator(forward=forward, backward=backward)
    for judgment, results in (
        ("forward_accuracy", {"y"}),
        ("gradient_accuracy", {"y", "dx", "dweight"}),
    ):
        judge(scale.case(judgment, wrong), dump=tmp_path)
        dumped = torch.load(tmp_path / f"scale_golden_{judgment}_float32" / "last_run.pt")
        assert set(dumped) == {"x", "weight", "dy", *results}


@pytest.mark.parametrize(("tensor", "status"), [(None, "passed"), ("dx", "failed")])
def test_repeatable_fresh_process_with_other_bits_is_red(scale, monkeypatch, tensor, status):
    operator = scale.operator()
    case = scale.case("repeatable", operator)
    monkeypatch.setattr(registry, "discover", lambda: ({"scale": operator}, {}))
    candidate = gates.Candidate(gates.Execution(operator), "golden", case.device)
    found = digests(case, candidate)
    found[tensor] = "0" * 64
    monkeypatch.setattr(
        sys.modules[digests.__module__],
        "_fresh_digests",
        lambda name, backend, seed: {"float32": found},
    )
    fresh = [r for r in judge(case) if r.config == "fresh_process"]
    assert {r.tensor: r.status for r in fresh} == {
        "y": "passed", "dx": status, "dweight": "passed",
    }  # fmt: skip


def test_repeatable_declaration_not_installed_leaves_the_fresh_process_not_run(scale):
    records = scale.records("repeatable")
    assert Counter(r.status for r in records) == {"passed": 6, "not_run": 1}
    (skipped,) = (r for r in records if r.status == "not_run")
    assert skipped.config == "fresh_process"


def summary(records, **options):
    return summarise(records, tier="short", seed=1, environment={}, **options)


def test_summarise_green_records_pass_beside_those_not_run(scale):
    report = summary(scale.records("repeatable"))
    assert (report.schema, report.status, report.passed) == (SCHEMA, "passed", True)


def test_summarise_nothing_judged_is_red(scale):
    row = Backend("golden", lambda: None, ("nvidia",))
    skipped = scale.records("layout", scale.operator(row=lambda _: row))
    for records in ([], skipped):
        assert (summary(records).status, summary(records).passed) == ("failed", False)


def test_summarise_one_red_record_or_an_interruption_is_no_pass(scale):
    green = scale.records("forward_accuracy")
    red = scale.records("backend_equal")
    assert (summary(green + red).status, summary(green + red).passed) == ("failed", False)
    broken = summary(green, interrupted=True)
    assert (broken.status, broken.passed, broken.records) == ("interrupted", False, green)
