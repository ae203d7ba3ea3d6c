# SPDX-License-Identifier: Apache-2.0
"""Fixtures are deterministic, and hold values that say something in their dtype."""

import pytest
import torch

from rlk.gates.agreement import agreement_inputs
from rlk.gates.inputs import (
    VALUES,
    edge_sizes,
    fixture,
    forty_decades,
    judged_sizes,
    row_elements,
    scalar_variants,
)
from rlk.gates.invariance import _spread_rows
from rlk.operator import FLOATS, Scalar, Tensor, Workload

SIZES = {"N": 64}


def batch(scale, dtype, values=None, seed=1):
    return fixture(scale.operator(), dtype, rows=33, sizes=SIZES, seed=seed, values=values)


def test_fixture_same_seed_is_the_same_and_another_seed_is_not(scale):
    first, again, other = (batch(scale, "float32", seed=s).inputs["x"] for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_fixture_before_quantisation_is_not_representable_in_bfloat16(scale):
    for name, tensor in batch(scale, "float32").inputs.items():
        inexact = (tensor.to(torch.bfloat16).float() != tensor).double().mean()
        assert inexact.item() > 0.9, name


def test_fixture_tensors_of_one_seed_are_unlike_each_other(scale):
    made = batch(scale, "float32")
    assert not torch.equal(made.inputs["x"] * 4, made.upstream["y"])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", [*VALUES, "spread_rows"])
def test_values_of_every_kind_are_finite_and_not_all_zero(scale, kind, dtype):
    made = batch(scale, dtype, {**VALUES, "spread_rows": _spread_rows}[kind])
    for tensor in (made.inputs["x"], made.upstream["y"]):
        share = tensor.isfinite().double().mean().item()
        assert share == 1 or (kind == "non_finite" and 0.99 < share < 1)
        assert (tensor != 0).double().mean().item() > 0.7


@pytest.mark.parametrize("dtype", FLOATS)
def test_values_subnormal_are_below_the_smallest_normal_number(scale, dtype):
    x = batch(scale, dtype, VALUES["subnormal"]).inputs["x"]
    assert (x.abs() < torch.finfo(x.dtype).tiny).double().mean().item() > 0.9
    assert (x < 0).any()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("values", [VALUES["decades"], forty_decades])
def test_values_decades_leave_squares_finite_in_float32(scale, dtype, values):
    x = batch(scale, dtype, values).inputs["x"].float()
    assert x.square().sum(1).isfinite().all()
    spread = 6 if values is not forty_decades else 9 if dtype == "float16" else 38
    x = x[x != 0].abs().double()
    assert (x.max() / x.min()).log10() > spread


def test_edge_sizes_of_rows_with_one_axis_are_lengths_and_of_several_those_declared(scale):
    assert edge_sizes(scale.operator(), (1, 5)) == [{"N": 1}, {"N": 5}]
    axes = ("...", "H", "D")
    several = scale.operator(
        inputs=(Tensor("x", axes, FLOATS, gradient="row"),),
        workloads=(Workload("a", {"T": 9, "H": 4, "D": 8}), Workload("b", {"H": 2, "D": 8})),
        odd_sizes=({"H": 1, "D": 3},),
    )
    assert edge_sizes(several, (1, 5)) == [{"H": 4, "D": 8}, {"H": 1, "D": 3}]


def test_sizes_declared_for_gates_are_judged_up_to_what_each_tier_can_do(scale):
    declared = ({"H": 1, "D": 3}, {"H": 5, "D": 1000}, {"H": 1, "D": 70000})
    operator = scale.operator(
        inputs=(Tensor("x", ("...", "H", "D"), FLOATS, gradient="row"),),
        outputs=(Tensor("y", ("...", "H", "D"), ("=x",)),),
        workloads=(Workload("a", {"T": 9, "H": 400, "D": 800}),),
        gate_sizes={"H": 2, "D": 8},
        odd_sizes=declared,
    )
    assert [row_elements(operator, sizes) for sizes in declared] == [3, 5000, 70000]
    assert edge_sizes(operator, (1, 5)) == list(declared)
    assert list(judged_sizes(operator, "full").values()) == [{"H": 2, "D": 8}, *declared[:2]]
    for tier, edges in (("short", 1), ("full", 3)):
        configs = {c.split("_rows")[0] for c, _ in agreement_inputs(operator, "float32", tier)}
        assert configs & {"H=1_D=3", "H=5_D=1000", "H=1_D=70000"} == {
            f"H={sizes['H']}_D={sizes['D']}" for sizes in declared[:edges]
        }


def test_fixture_values_leave_inputs_without_gradient_normal(scale):
    operator = scale.operator(
        inputs=(
            Tensor("x", ("...", "N"), FLOATS, gradient="row"),
            Tensor("table", ("...", "N"), ("float32",)),
        )
    )
    made = fixture(operator, "float32", rows=33, sizes=SIZES, seed=1, values=VALUES["subnormal"])
    assert made.inputs["x"].abs().max() < torch.finfo(torch.float32).tiny
    assert made.inputs["table"].std() > made.inputs["x"].abs().max()


def test_scalar_variants_change_one_scalar_at_a_time(scale):
    scalars = (
        Scalar("eps", 1e-6, also=(0.5,)),
        Scalar("kind", "a", choices=("a", "b"), aliases={"c": "b"}),
    )
    assert scalar_variants(scale.operator(scalars=scalars)) == {
        "default": {"eps": 1e-6, "kind": "a"},
        "eps=0.5": {"eps": 0.5, "kind": "a"},
        "kind=b": {"eps": 1e-6, "kind": "b"},
        "kind=c": {"eps": 1e-6, "kind": "c"},
    }
