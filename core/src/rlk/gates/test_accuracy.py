# SPDX-License-Identifier: Apache-2.0
"""The judge of values: the oracle passes, impostors and small shifts do not."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlk import backends, contract
from rlk.between import show
from rlk.errors import RlkError
from rlk.gates import accuracy
from rlk.gates.accuracy import impostors, judge_tensor, reference
from rlk.gates.inputs import fixture
from rlk.launch import start_golden
from rlk.operator import FLOATS, Scalar, Tensor, Workload

NAMES = ("y", "dx", "dweight")


def expected(scale, name):
    made = fixture(scale.operator(), "float32", rows=accuracy.ROWS, sizes={"N": 128}, seed=3)
    return reference(scale.operator(), made)[name]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_judge_tensor_rounded_oracle_passes(scale, name, dtype):
    wanted = expected(scale, name)
    judged = judge_tensor(scale.operator(), name, wanted.to(getattr(torch, dtype)), wanted)
    assert judged.faults == ()
    assert (judged.correctly_rounded, judged.within) == (1.0, wanted.numel())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("impostor", ["zeros", "shuffled", "sign-flipped"])
def test_judge_tensor_impostor_is_rejected(scale, impostor, name, dtype):
    wanted = expected(scale, name)
    wrong = impostors(wanted)[impostor].to(getattr(torch, dtype))
    assert judge_tensor(scale.operator(), name, wrong, wanted).faults


@pytest.mark.parametrize("dtype", FLOATS)
def test_judge_tensor_small_gradient_zeros_pass_the_ceiling_alone(scale, dtype):
    # What the public bounds let through: all zeros in place of gradients below atol.
    wanted = (
        expected(scale, "dx")
        * contract.load().accuracy("gradient_accuracy", "elementwise", dtype).atol
        / 100
    )
    judged = judge_tensor(
        scale.operator(), "dx", torch.zeros_like(wanted, dtype=getattr(torch, dtype)), wanted
    )
    assert judged.within == judged.total
    assert any("ulp at RMS" in fault for fault in judged.faults)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_judge_tensor_one_non_finite_element_is_rejected(scale, value):
    wanted = expected(scale, "y")
    actual = wanted.float()
    actual[5, 7] = value
    judged = judge_tensor(scale.operator(), "y", actual, wanted)
    assert judged.within == judged.total - 1
    assert len(judged.faults) == 2


def test_judge_tensor_many_wrong_roundings_are_rejected(scale):
    wanted = expected(scale, "y")
    actual = wanted.to(torch.bfloat16)
    # Towards zero in place of to nearest, in the first 40 rows.
    bits = wanted[:40].float().view(torch.int32) & ~0xFFFF
    actual[:40] = bits.view(torch.float32).to(torch.bfloat16)
    (fault,) = judge_tensor(scale.operator(), "y", actual, wanted).faults
    assert "correctly rounded" in fault


def test_judge_tensor_parameter_gradient_is_free_of_the_fraction(scale):
    wanted = expected(scale, "dweight")
    actual = wanted.to(torch.float16)
    # The closest call among 128 columns, decided the other way.
    error = (wanted.to(torch.float16).double() - wanted).abs()
    closest = error.div(wanted.abs()).argmax()
    actual.view(torch.int16)[closest] += 1 if actual[closest].abs() < wanted[closest].abs() else -1
    judged = judge_tensor(scale.operator(), "dweight", actual, wanted)
    assert judged.correctly_rounded < 0.999
    assert judged.faults == ()


def test_reference_alias_reaches_the_oracle_as_the_caller_wrote_it(scale):
    seen = []

    def oracle(x, weight, *, kind):
        seen.append(kind)
        return (x * weight,)

    kind = Scalar("kind", "a", choices=("a", "b"), aliases={"c": "b"})
    operator = scale.operator(scalars=(kind,), oracle=oracle)
    made = fixture(operator, "float32", rows=3, sizes={"N": 8}, seed=0, scalars={"kind": "c"})
    reference(operator, made)
    assert seen == ["c"]


@pytest.mark.parametrize("gradient", [False, True])
def test_reference_declared_cast_rounds_in_the_dtype_of_the_call(scale, gradient):
    def oracle(x, weight, *, cast):
        return (cast(x * weight, gradient=gradient) * 3,)

    operator = scale.operator(oracle=oracle, casts=("product",))
    made = fixture(operator, "bfloat16", rows=3, sizes={"N": 8}, seed=0)
    x, weight = (made.inputs[n].double() for n in ("x", "weight"))
    found = reference(operator, made)
    narrow = (x * weight).to(torch.bfloat16).double()
    assert torch.equal(found["y"], narrow * 3)
    assert not torch.equal(narrow, x * weight)
    upstream = made.upstream["y"].double() * 3
    rounded = upstream.to(torch.bfloat16).double() if gradient else upstream
    assert torch.equal(found["dx"], rounded * weight)


def with_cast(scale, forward=None, steps=1):
    """y = 3 * product, the product being rounded, stored, and handed on with its gradient."""

    def oracle(x, weight, *, cast):
        product = cast(x * weight, gradient=True)
        for _ in range(steps - 1):
            product = cast(product)
        return product * 3, product

    product = Tensor("product", ("...", "N"), ("=x",))

    def backward(dy, x, weight, product, *, needs):
        return scale.backward((dy.float() * 3).to(x.dtype), x, weight, needs=needs)

    return scale.operator(
        forward or rounded_product,
        backward,
        oracle=oracle,
        casts=("product",),
        saved=(product,),
        claims=(),
    )


def rounded_product(x, weight, numbers=0):
    start_golden("scale_forward", __file__)
    product = (x.float() * weight.float()).to(x.dtype)
    product = (product.view(torch.int16) + numbers).view(x.dtype)
    return (product.float() * 3).to(x.dtype), product


def test_reference_goes_on_from_the_candidates_casts_and_returns_what_they_round(scale):
    operator = with_cast(scale)
    made = fixture(operator, "bfloat16", rows=3, sizes={"N": 8}, seed=0)
    x, weight = (made.inputs[n].double() for n in ("x", "weight"))
    given = {name: torch.randn(3, 8).bfloat16() for name in ("product", "dproduct")}
    found = reference(operator, made, given)
    assert torch.equal(found["y"], given["product"].double() * 3)
    assert torch.equal(found["dx"], given["dproduct"].double() * weight)
    assert torch.equal(found["product"], x * weight)
    assert torch.equal(found["dproduct"], made.upstream["y"].double() * 3)


def test_reference_more_casts_than_declared_are_refused(scale):
    operator = with_cast(scale, steps=2)
    made = fixture(operator, "bfloat16", rows=3, sizes={"N": 8}, seed=0)
    with pytest.raises(RlkError, match="scale: oracle must cast product alone, got more"):
        reference(operator, made)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_judge_tensor_cast_may_be_rounded_either_way_next_to_a_middle_alone(scale, dtype):
    narrow = getattr(torch, dtype)
    one, eps = torch.tensor(1.0, dtype=narrow), torch.finfo(narrow).eps
    # The middle of 1 and the next number, and a quarter above 1, among many exact ones.
    wanted = torch.ones(2000, dtype=torch.float64)
    wanted[0], wanted[1] = 1 + eps / 2, 1 + eps / 4
    operator = with_cast(scale)
    actual = wanted.to(narrow)
    for first in (one, one + eps):
        actual[0] = first
        assert judge_tensor(operator, "product", actual, wanted).faults == ()
    actual[1] = one + eps
    (fault,) = judge_tensor(operator, "product", actual, wanted).faults
    assert fault == "1 of 2000 elements are no rounding of a value within 5 ulp of FP32 at RMS"
    assert judge_tensor(operator, "y", actual, wanted).faults == ()


@pytest.mark.parametrize(("numbers", "failed"), [(0, set()), (1, {"product"})])
def test_record_wrong_stored_cast_is_red_and_what_follows_is_judged_given_it(
    scale, numbers, failed
):
    operator = with_cast(scale, lambda x, weight: rounded_product(x, weight, numbers))
    records = scale.records("forward_accuracy", operator, dtype="bfloat16")
    assert {r.tensor for r in records} == {"y", "product"}
    assert {r.tensor for r in records if r.status == "failed"} == failed


@pytest.mark.parametrize(("factor", "failed"), [(1.0, set()), (1.01, {"dproduct"})])
def test_record_shown_gradient_is_judged_and_what_follows_is_judged_given_it(scale, factor, failed):
    def backward(dy, x, weight, product, *, needs):
        dproduct = (dy.float() * 3 * factor).to(x.dtype)
        show("dproduct", dproduct)
        return scale.backward(dproduct, x, weight, needs=needs)

    module = SimpleNamespace(forward=rounded_product, backward=backward)
    operator = replace(with_cast(scale), backends=(backends.golden(lambda: module),))
    records = scale.records("gradient_accuracy", operator, dtype="bfloat16")
    assert {r.tensor for r in records} == {"dx", "dweight", "dproduct"}
    assert {r.tensor for r in records if r.status == "failed"} == failed


def test_record_judge_that_accepts_zeros_is_red(scale, monkeypatch):
    # A tensor whose right answer is zero everywhere gives nothing to tell an impostor by.
    operator = scale.operator(
        forward=lambda x, weight: (scale.forward(x, weight)[0] * 0.0,),
        oracle=lambda x, weight: (x * weight * 0.0,),
    )
    (record,) = scale.records("forward_accuracy", operator)
    assert record.status == "failed"
    assert "the judge accepts zeros in place of y" in record.reason


def test_record_sizes_below_those_declared_for_accuracy_are_left_to_the_gates_of_bits(scale):
    # An oracle of zeros: no judge can tell an impostor there.
    operator = scale.operator(
        workloads=(Workload("a", {"T": 9, "N": 4}), Workload("b", {"N": 40})),
        oracle=lambda x, weight: (x * weight * float(x.shape[-1] >= 40),),
        accuracy_from={"N": 40},
    )
    (record,) = scale.records("forward_accuracy", operator, tier="full")
    assert (record.config, record.status) == ("N=40_default", "passed")
    judged = replace(operator, accuracy_from={})
    small, _ = scale.records("forward_accuracy", judged, tier="full")
    assert (small.config, small.status) == ("default", "failed")
