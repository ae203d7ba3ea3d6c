# SPDX-License-Identifier: Apache-2.0
"""Values against the FP64 oracle, and what special numbers turn into."""

import math

import pytest
import torch

from rlk import contract
from rlk.compare import assert_same_bits
from rlk.gates.accuracy import judge_tensor, reference

LONG = (65535, 65536, 65537)


def assert_accurate(norm, batch, run):
    """Every tensor of a run within the contract of the oracle in FP64."""
    expected = reference(norm.operator, batch)
    for name, tensor in run.items():
        judgment = "gradient_accuracy" if name.startswith("d") else "forward_accuracy"
        assert judge_tensor(norm.operator, judgment, tensor, expected[name]).faults == (), name


def free_scalars(norm, batch):
    """The scalars of a batch that the public function takes."""
    return {s.name: batch.scalars[s.name] for s in norm.operator.free_scalars}


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("n", [131, 256])
def test_gradients_random_weights_match_autograd_of_the_oracle(norm, backend, dtype, n, offset):
    scalars = norm.batch().scalars
    if norm.name != "qwen3_next_rms_norm":
        scalars["weight_offset"] = offset
    # FP32 weights: the contract counts correctly rounded elements, and a row holds too few.
    options = {"scalars": scalars, "parameter_dtype": "float32"}
    batch = norm.batch(dtype, rows=64, n=n, seed=11, **options)
    free = free_scalars(norm, batch)
    assert_accurate(norm, batch, norm.run(batch.inputs, batch.upstream["y"], backend, **free))


@pytest.mark.parametrize("n", LONG)
def test_golden_longest_rows_match_the_oracle(norm, dtype, n):
    batch = norm.batch(dtype, rows=2, n=n, seed=12)
    assert_accurate(norm, batch, norm.run(batch.inputs, batch.upstream["y"], "golden"))


def test_dx_rows_of_one_element_is_below_the_ceiling_of_the_contract(norm, backend, dtype):
    # Two nearly equal numbers cancel: only an absolute bound means anything.
    batch = norm.batch(dtype, rows=64, n=1, seed=11)
    dx = norm.run(batch.inputs, batch.upstream["y"], backend)["dx"]
    accuracy = judge_tensor(
        norm.operator, "gradient_accuracy", dx, reference(norm.operator, batch)["dx"]
    )
    assert accuracy.within == accuracy.total == 64


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_oracle_finite_differences_confirm_its_gradients(norm, activation):
    batch = norm.batch(rows=3, n=5)
    scalars = dict(batch.scalars)
    if "activation" in scalars:
        scalars["activation"] = activation
    leaves = [t.double().requires_grad_() for t in batch.inputs.values()]
    bound = contract.load().tolerance("gradient_accuracy", "reduction", "float32")
    assert torch.autograd.gradcheck(
        lambda *tensors: norm.operator.oracle(*tensors, **scalars)[0],
        leaves, atol=bound.atol, rtol=bound.rtol,
    )  # fmt: skip


def row_tensors(batch):
    """What has rows: x, gate where there is one, and the upstream gradient of y."""
    inputs = {name: tensor for name, tensor in batch.inputs.items() if name != "weight"}
    return {**inputs, **batch.upstream}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_element_of_any_tensor_leaves_other_rows_alone(norm, backend, value):
    good_batch = norm.batch(rows=5, n=129, seed=13)
    good = norm.run(good_batch.inputs, good_batch.upstream["y"], backend)
    others = [0, 1, 3, 4]
    for field in row_tensors(good_batch):
        batch = norm.batch(rows=5, n=129, seed=13)
        row_tensors(batch)[field][2, 7] = value
        bad = norm.run(batch.inputs, batch.upstream["y"], backend)
        for name in bad.keys() - {"dweight"}:
            assert_same_bits(bad[name][others], good[name][others], f"{name}, bad {field}")
        assert not bad["dx"][2].isfinite().all()
        assert not bad["dweight"][7].isfinite()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_element_of_dy_or_gate_leaves_other_columns_of_dweight_alone(norm, backend, value):
    good_batch = norm.batch(rows=5, n=129, seed=13)
    good = norm.run(good_batch.inputs, good_batch.upstream["y"], backend)["dweight"]
    columns = [c for c in range(129) if c != 7]
    for field in row_tensors(good_batch).keys() - {"x"}:
        batch = norm.batch(rows=5, n=129, seed=13)
        row_tensors(batch)[field][2, 7] = value
        bad = norm.run(batch.inputs, batch.upstream["y"], backend)["dweight"]
        assert_same_bits(bad[columns], good[columns], f"dweight, bad {field}")


def test_nan_element_of_x_makes_its_whole_row_nan(norm, backend):
    batch = norm.batch(rows=3, n=129, seed=13)
    batch.inputs["x"][1, 128] = math.nan
    run = norm.run(batch.inputs, batch.upstream["y"], backend)
    assert run["y"][1].isnan().all()
    assert run["dx"][1].isnan().all()
    assert run["dweight"].isnan().all()


def test_infinite_element_of_x_gives_nan_there_and_zero_beside_it(norm, backend):
    batch = norm.batch(rows=1, n=129, seed=13)
    batch.inputs["x"][0, 5] = math.inf
    y = norm.call(batch.inputs.values(), backend)
    assert y[0, 5].isnan()
    # The root mean square is infinite: its reciprocal is 0.
    others = torch.cat([y[0, :5], y[0, 6:]])
    assert others.count_nonzero() == 0


def test_row_whose_squares_overflow_gives_zeros(norm, backend):
    batch = norm.batch("bfloat16", rows=2, n=129, seed=13)
    batch.inputs["x"][0] = 2.0**64
    y = norm.call(batch.inputs.values(), backend)
    assert y[0].count_nonzero() == 0
    assert y[1].count_nonzero() == 129


def test_zero_row_without_eps_is_nan_and_with_eps_zero(norm, backend):
    batch = norm.batch(rows=1, n=129, seed=13)
    batch.inputs["x"].zero_()
    assert norm.call(batch.inputs.values(), backend, eps=0.0).isnan().all()
    assert norm.call(batch.inputs.values(), backend).count_nonzero() == 0


def test_negative_zero_of_x_keeps_its_sign_in_y(norm, backend):
    batch = norm.batch(rows=1, n=4)
    batch.inputs["x"] = torch.tensor([[-0.0, 0.0, 1.0, -1.0]])
    batch.inputs["weight"] = torch.ones(4)
    if "gate" in batch.inputs:
        batch.inputs["gate"] = torch.ones(1, 4)
    y = norm.call(batch.inputs.values(), backend)
    assert torch.signbit(y).tolist() == [[True, False, False, True]]


def test_subnormal_results_are_not_flushed(norm, backend):
    # weight * x is 2^-140 times a normal number: lost where subnormals are flushed.
    batch = norm.batch(rows=1, n=4)
    batch.inputs["x"] = torch.ones(1, 4)
    batch.inputs["weight"] = torch.full((4,), 2.0**-140)
    scalars = {"eps": 0.0}
    expected = torch.full((1, 4), 2.0**-140)
    if norm.name == "qwen3_next_rms_norm":
        expected = torch.ones(1, 4)
    if "gate" in batch.inputs:
        batch.inputs["gate"] = torch.full((1, 4), 64.0)
        scalars["activation"] = "sigmoid"
    assert_same_bits(norm.call(batch.inputs.values(), backend, **scalars), expected, "y")
