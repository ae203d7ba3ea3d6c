# SPDX-License-Identifier: Apache-2.0
"""What does not fit is refused in one sentence that names the argument and both values."""

import math

import pytest
import torch

import rlk_qwen3next
from rlk.errors import ArgumentError, BackendError
from rlk_qwen3next import rms_norm, rms_norm_gated


def rows(*shape, dtype=torch.float32, device=None):
    return torch.zeros(shape, dtype=dtype, device=device)


FLOATS = "float32 or bfloat16 or float16"
REFUSED = [
    ([rows(2, 4, dtype=torch.float64), rows(4)], f"x must be {FLOATS}, got float64"),
    ([rows(2, 4, dtype=torch.int64), rows(4)], f"x must be {FLOATS}, got int64"),
    ([rows(2, 4, dtype=torch.complex64), rows(4)], f"x must be {FLOATS}, got complex64"),
    ([2.0, rows(4)], "x must be a tensor, got float"),
    ([rows(2, 4).to_sparse(), rows(4)], "x must be a dense tensor, got torch.sparse_coo"),
    ([rows(), rows(4)], "x must be [..., N], got []"),
    ([rows(2, 0), rows(0)], "x must be [..., N] with no empty row, got [2, 0]"),
    ([rows(0), rows(0)], "x must be [..., N] with no empty row, got [0]"),
    ([rows(2, 4), None], "weight must be a tensor, got NoneType"),
    ([rows(2, 4), rows(5)], "weight must be [N] with N=4, got [5]"),
    ([rows(2, 4), rows(1, 4)], "weight must be [N] with N=4, got [1, 4]"),
    ([rows(2, 4), rows()], "weight must be [N] with N=4, got []"),
    (
        [rows(2, 4), rows(4, dtype=torch.bfloat16)],
        "weight must be float32 like x, got bfloat16",
    ),
    (
        [rows(2, 4, dtype=torch.bfloat16), rows(4, dtype=torch.float16)],
        "weight must be bfloat16 like x or float32, got float16",
    ),
    (
        [rows(2, 4, dtype=torch.float16), rows(4, dtype=torch.float64)],
        "weight must be float16 like x or float32, got float64",
    ),
    ([rows(2, 4), rows(4, device="meta")], "weight must be on cpu like x, got meta"),
    ([rows(2, 4, device="meta"), rows(4)], "weight must be on meta like x, got cpu"),
]


def message(function, *arguments, error=ArgumentError, **options):
    with pytest.raises(error) as caught:
        function(*arguments, **options)
    return str(caught.value)


@pytest.mark.parametrize(("tensors", "complaint"), REFUSED, ids=lambda v: v if str(v) == v else "")
@pytest.mark.parametrize("name", ["rms_norm", "qwen3_next_rms_norm"])
def test_tensors_that_do_not_fit_are_refused_in_one_sentence(name, tensors, complaint):
    function = getattr(rlk_qwen3next, name)
    assert message(function, *tensors) == f"{name}: {complaint}"


@pytest.mark.parametrize(
    ("gate", "complaint"),
    [
        (rows(2, 3, 5), "gate must be [..., N] with N=4, got [2, 3, 5]"),
        (rows(3, 2, 4), "gate must be [2, 3, 4] like x, got [3, 2, 4]"),
        (rows(6, 4), "gate must be [2, 3, 4] like x, got [6, 4]"),
        (rows(4), "gate must be [2, 3, 4] like x, got [4]"),
        (rows(2, 3, 4, dtype=torch.bfloat16), "gate must be float32 like x, got bfloat16"),
        (rows(2, 3, 4, device="meta"), "gate must be on cpu like x, got meta"),
        (None, "gate must be a tensor, got NoneType"),
    ],
)
def test_gate_unlike_x_is_refused_by_both_shapes(gate, complaint):
    refused = message(rms_norm_gated, rows(2, 3, 4), gate, rows(4))
    assert refused == f"rms_norm_gated: {complaint}"


@pytest.mark.parametrize(
    ("eps", "complaint"),
    [
        (-1e-6, "a finite float32 of at least 0.0, got -1e-06"),
        (math.nan, "a finite float32 of at least 0.0, got nan"),
        (math.inf, "a finite float32 of at least 0.0, got inf"),
        (1e39, "a finite float32 of at least 0.0, got 1e+39"),
        (True, "a number, got True"),
        ("1e-6", "a number, got '1e-6'"),
        (None, "a number, got None"),
    ],
)
def test_eps_that_is_no_small_number_is_refused(norm, eps, complaint):
    refused = message(norm.call, norm.batch().inputs.values(), eps=eps)
    assert refused == f"{norm.name}: eps must be {complaint}"


@pytest.mark.parametrize("offset", [math.nan, math.inf, -math.inf])
def test_weight_offset_not_finite_is_refused(rms_norm, rms_norm_gated, offset):
    for norm in (rms_norm, rms_norm_gated):
        refused = message(norm.call, norm.batch().inputs.values(), weight_offset=offset)
        assert refused == f"{norm.name}: weight_offset must be a finite float32, got {offset}"


def test_rounding_not_offered_is_refused(rms_norm, qwen3_next_rms_norm):
    for norm in (rms_norm, qwen3_next_rms_norm):
        refused = message(norm.call, norm.batch().inputs.values(), rounding="up")
        offered = "one of ieee, vllm" if norm is rms_norm else "'ieee'"
        assert refused == f"{norm.name}: rounding must be {offered}, got 'up'"


def test_activation_unknown_is_refused_with_the_known_ones(rms_norm_gated):
    refused = message(rms_norm_gated.call, rms_norm_gated.batch().inputs.values(), activation="x")
    expected = "activation must be one of silu, sigmoid, swish, got 'x'"
    assert refused == f"rms_norm_gated: {expected}"


def test_backend_unknown_is_refused_with_the_declared_ones(norm):
    refused = message(norm.call, norm.batch().inputs.values(), "cublas", error=BackendError)
    names = ", ".join(f"'{backend.name}'" for backend in norm.operator.backends)
    assert refused == f"{norm.name}: backend must be one of 'auto', {names}, got 'cublas'"


def test_gradient_that_does_not_fit_is_refused_by_the_operator_of_torch(norm):
    batch = norm.batch("bfloat16", rows=2, n=4)
    _, rstd = norm.forward(batch, "golden")
    for dy, complaint in [
        (rows(2, 5, dtype=torch.bfloat16), "[2, 4], got [2, 5]"),
        (rows(2, 4), "bfloat16, got float32"),
    ]:
        batch.upstream["y"] = dy
        refused = message(norm.backward, batch, rstd, "golden")
        assert refused == f"{norm.name}: gradient of y must be {complaint}"


def test_scalar_numpy_float_is_taken_as_a_number():
    # numpy.float64 is a float of Python.
    eps = torch.tensor(1e-6, dtype=torch.float64).numpy()[()]
    x, weight = torch.ones(1, 4), torch.ones(4)
    assert torch.equal(rms_norm(x, weight, eps), rms_norm(x, weight, 1e-6))
