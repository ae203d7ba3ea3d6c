# SPDX-License-Identifier: Apache-2.0
"""Tokens of one sample judged as rows, on out = x + shift of each sample."""

from types import SimpleNamespace

import pytest
import torch

from rlk import backends
from rlk.compare import assert_same_bits
from rlk.errors import ArgumentError
from rlk.execution import Execution
from rlk.gates import cases, judge
from rlk.gates.inputs import edge_sizes, judged_sizes
from rlk.gates.invariance import FEW_PERMUTATIONS, PERMUTATIONS
from rlk.gates.tokens import view_of_tokens
from rlk.launch import start_golden
from rlk.operator import FLOATS, Claim, Operator, Reduction, Tensor, Workload
from rlk.reduce import exact_sum
from rlk.test_support.sabotage import red

# 8: from so many tokens on, the faults below.
MANY = 8


def token_sums(dout):
    """[T, N]: the exact sums over tokens, rounded once."""
    columns = dout.float().movedim(1, 0).flatten(1)
    state = exact_sum.add_rows(exact_sum.new(columns.shape[1]), columns, backend="golden")
    rounded = exact_sum.round(state, dout.dtype, backend="golden")
    return rounded.view(len(dout), -1)


def fold(dout):
    total = torch.zeros_like(dout[:, 0], dtype=torch.float32)
    for token in dout.float().unbind(1):
        total = total + token
    return total.to(dout.dtype)


def fold_of_many(dout):
    return (fold if dout.shape[1] >= MANY else token_sums)(dout)


def forward(x, shift):
    start_golden("shift_forward", __file__)
    return ((x.float() + shift.float()[:, None]).to(x.dtype),)


def forward_dropping_the_shift_of_many(x, shift):
    (out,) = forward(x, shift)
    out[:, MANY:] = x[:, MANY:]
    return (out,)


def forward_adding_the_shift_once_a_sample(x, shift):
    (out,) = forward(x, shift)
    out[1:] = x[1:]
    return (out,)


def operator(forward=forward, sums=token_sums, **fields):
    def backward(dout, x, shift, *, needs):
        start_golden("shift_backward", __file__)
        dx = dout.clone() if "x" in needs else None
        return dx, sums(dout) if "shift" in needs else None

    module = SimpleNamespace(forward=forward, backward=backward)
    declared = {
        "name": "shift",
        "package": "none",
        "bits_version": 1,
        "formula": "out = x + shift",
        "inputs": (
            Tensor("x", ("...", "S", "N"), FLOATS, gradient="row"),
            Tensor("shift", ("...", "N"), ("=x",), gradient="row"),
        ),
        "scalars": (),
        "outputs": (Tensor("out", ("...", "S", "N"), ("=x",)),),
        "saved": (),
        "reductions": (Reduction("dshift", "exact_sum", "S"),),
        "category": "elementwise",
        "claims": (Claim("order_free", ("dshift",)),),
        "workloads": (
            Workload("long", {"T": 1, "S": 90, "N": 8}),
            Workload("short", {"T": 4, "S": 3, "N": 8}),
        ),
        "oracle": lambda x, shift: (x + shift.unsqueeze(-2),),
        "backends": (backends.golden(lambda: module),),
        "odd_sizes": ({"S": 1, "N": 5},),
    }
    return Operator(**{**declared, **fields})


def records(made, judgment, tier="short", dtype="float32"):
    (case,) = cases([made], tier=tier, identity=f"shift/golden/{judgment}/{dtype}")
    return judge(case)


def test_view_of_tokens_has_rows_of_tokens_and_parameters_of_the_sample():
    view = view_of_tokens(operator(), "S")
    assert [(t.shape, t.gradient) for t in view.inputs] == [
        (("...", "N"), "row"),
        (("N",), "parameter"),
    ]
    assert view.outputs[0].shape == ("...", "N")
    assert [w.sizes for w in view.workloads] == [{"T": 90, "N": 8}, {"T": 3, "N": 8}]
    assert (view.token_axis, view.exact_sums) == (None, ("dshift",))


def test_sizes_of_samples_have_the_fewest_tokens_of_a_model():
    assert judged_sizes(operator(), "full") == {"": {"S": 3, "N": 8}}
    assert edge_sizes(operator(), (1,)) == [{"S": 1, "N": 5}]


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_judgment_of_a_right_operator_passes(dtype):
    for judgment in ("forward_invariance", "gradient_invariance", "order_free", "layout"):
        assert {r.status for r in records(operator(), judgment, dtype=dtype)} == {"passed"}


def test_order_free_judges_permutations_and_padding_of_tokens():
    configs = [r.config for r in records(operator(), "order_free")]
    permutations = [f"tokens_permutation_{i}" for i in range(FEW_PERMUTATIONS)]
    assert configs == [*permutations, "tokens_zero_padded"]


def test_order_free_full_tier_adds_the_tokens_of_the_longest_sample():
    found = records(operator(), "order_free", tier="full")
    assert [r.config for r in found].count("tokens_of_90_zero_padded") == 1
    assert len(found) == 2 * (PERMUTATIONS + 1)


def test_order_free_sums_that_fold_tokens_are_red():
    found = records(operator(sums=fold), "order_free")
    assert red(found) == {("order_free", "dshift")}
    assert {r.config for r in found if r.status == "failed"} >= {"tokens_permutation_0"}


def test_order_free_sums_that_fold_many_tokens_alone_are_red():
    # Samples of three tokens do not show it.
    made = operator(sums=fold_of_many)
    assert red(records(made, "order_free")) == {("order_free", "dshift")}
    assert red(records(made, "gradient_invariance")) == set()


def test_invariance_of_a_token_that_knows_its_place_is_red_as_a_row():
    found = records(operator(forward_dropping_the_shift_of_many), "forward_invariance")
    failed = {r.config for r in found if r.status == "failed"}
    assert failed
    assert {config.split("_")[0] for config in failed} == {"tokens"}


def test_invariance_of_a_sample_that_knows_its_place_is_red_as_a_sample():
    found = records(operator(forward_adding_the_shift_once_a_sample), "forward_invariance")
    failed = {r.config for r in found if r.status == "failed"}
    assert failed
    assert not any(config.startswith("tokens") for config in failed)


def test_layout_of_tokens_is_judged_with_samples_and_tokens_swapped():
    found = records(operator(), "layout")
    shapes = {r.config: r.shape for r in found if r.tensor == "out"}
    assert shapes["swapped_inputs"] == [7, 3, 8]


@pytest.mark.parametrize("shape", [(2, 0, 8), (0, 3, 8), (0, 8)])
def test_call_without_tokens_gives_empty_rows_and_sums_of_nothing(shape):
    execution = Execution(operator())
    x, shift = torch.ones(shape), torch.ones(*shape[:-2], 8)
    (out,) = execution.forward(x, shift, "golden")
    dx, dshift = execution.backward(out, x, shift, True, True, "golden")
    assert out.shape == dx.shape == shape
    assert_same_bits(dshift, torch.zeros_like(shift), "dshift")


def test_call_without_columns_is_refused_by_name():
    with pytest.raises(ArgumentError, match=r"x must be \[..., S, N\] with no empty row, got"):
        Execution(operator()).forward(torch.ones(2, 3, 0), torch.ones(2, 0), "golden")
