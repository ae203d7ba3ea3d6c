# SPDX-License-Identifier: Apache-2.0
"""How a gradient that is a chain over rows is judged."""

from collections import Counter

import pytest
import torch

from rlk.gates.accuracy import judge_tensor
from rlk.gates.chains import APPENDED
from rlk.launch import start_golden
from rlk.operator import FLOATS, Tensor
from rlk.test_support.tiny import ascending

INPUTS = (
    Tensor("x", ("...", "N"), FLOATS, gradient="row"),
    Tensor("weight", ("N",), ("=x", "float32"), gradient="chain"),
)


def chain(add=ascending):
    """A backward whose dweight adds rows by `add`."""

    def backward(dy, x, weight, *, needs):
        start_golden("scale_backward", __file__)
        dx = dweight = None
        if "x" in needs:
            dx = (dy.float() * weight.float()).to(x.dtype)
        if "weight" in needs:
            dweight = add(dy.float() * x.float()).to(weight.dtype)
        return dx, dweight

    return backward


def halves(terms):
    """A split by the number of rows, as of split-K."""
    half = len(terms) // 2
    return ascending(terms[:half]) + ascending(terms[half:])


@pytest.fixture
def chained(scale):
    return lambda add=ascending, **fields: scale.operator(
        backward=chain(add), inputs=INPUTS, claims=(), **fields
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("judgment", "counts"),
    [
        ("gradient_accuracy", {"dx": 1, "dweight": 1}),
        # 12 arrangements of rows, which a chain does not survive, and zeros at the end.
        ("gradient_invariance", {"dx": 12 + len(APPENDED), "dweight": len(APPENDED)}),
        ("layout", {"y": 11, "dx": 11, "dweight": 11, "x": 2, "weight": 2, "dy": 2}),
        ("special_values", {"y": 8, "dx": 8, "dweight": 4}),
    ],
)
def test_judge_ascending_chain_passes_with_its_counts(scale, chained, judgment, counts, dtype):
    records = scale.records(judgment, chained(), dtype=dtype)
    assert [r.reason for r in records if r.status != "passed"] == []
    assert Counter(r.tensor for r in records) == counts


def test_gradient_invariance_split_by_the_number_of_rows_is_red_in_the_chain_alone(scale, chained):
    records = scale.records("gradient_invariance", chained(halves))
    red = {(r.tensor, r.config) for r in records if r.status == "failed"}
    assert {tensor for tensor, _ in red} == {"dweight"}
    assert len(red) == len(APPENDED)


def test_gradient_invariance_mean_over_rows_is_red(scale, chained):
    records = scale.records("gradient_invariance", chained(lambda t: ascending(t) / len(t)))
    assert {r.tensor for r in records if r.status == "failed"} == {"dweight"}


def test_layout_chain_in_another_dtype_than_its_parameter_is_red(scale, chained):
    operator = chained(lambda terms: ascending(terms).double())
    # From autograd it comes cast; from the backend as it was made.
    operator.backends[0].load().backward = lambda *tensors, needs: tuple(
        None if g is None else g.float() for g in chain()(*tensors, needs=needs)
    )
    records = scale.records("layout", operator, dtype="bfloat16")
    reasons = {r.tensor: r.reason for r in records if r.status == "failed"}
    assert "the backend returns dweight in float32" in reasons["dweight"]


def test_judge_tensor_chain_must_be_correctly_rounded_like_rows(chained):
    wanted = torch.linspace(1, 2, 4096, dtype=torch.float64) + 1e-3
    bits = wanted.float().view(torch.int32) & ~0xFFFF
    truncated = bits.view(torch.float32).to(torch.bfloat16)
    (fault,) = judge_tensor(chained(), "dweight", truncated, wanted).faults
    assert "correctly rounded" in fault
