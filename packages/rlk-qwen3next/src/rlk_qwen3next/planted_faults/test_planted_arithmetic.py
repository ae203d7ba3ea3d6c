# SPDX-License-Identifier: Apache-2.0
"""Faults of arithmetic: another formula, another rounding, another sign."""

from dataclasses import replace

import pytest
import torch

from rlk.math import golden as math
from rlk.math.golden import fma
from rlk.test_support.sabotage import Fault, changed, plant, rebound, red
from rlk_qwen3next.qwen3_next_rms_norm.operator import OPERATOR as ZERO_CENTRED
from rlk_qwen3next.rms_norm import golden as norm
from rlk_qwen3next.rms_norm_gated import golden
from rlk_qwen3next.rms_norm_gated.operator import OPERATOR

EVERYTHING_ACCURATE = {"forward_accuracy": "y rstd", "gradient_accuracy": "dx dgate dweight"}
ALL = "y rstd dx dgate dweight"


def row_dot_of_shifted_squares(a, b):
    return norm.row_dot(a, b) + torch.full_like(a[:, 0], 1e-4 * a.shape[1])


def contracted_input_gradient(g, xhat, rstd):
    m = math.divide(norm.row_dot(g, xhat), torch.full_like(rstd, g.shape[1]))
    return rstd[:, None] * fma(math.negate(xhat), m[:, None], g)


def contracted_silu_derivative(x):
    s = math.sigmoid(x)
    return s * fma(x, 1 - s, torch.ones_like(x))


def contracted():
    derivative = {**golden._DERIVATIVE, "silu": contracted_silu_derivative}
    return rebound(golden, input_gradient=contracted_input_gradient, _DERIVATIVE=derivative)


def swish_means_sigmoid(scalar):
    aliased = replace(scalar, aliases={"swish": "sigmoid"})
    return aliased if scalar.name == "activation" else scalar


def reciprocal_divide(a, b):
    return a * math.divide(torch.ones_like(b), b)


def offset_always_added(weight, weight_offset):
    return torch.full_like(weight.float(), weight_offset) + weight.float()


def backward_of_offset_always_added(*tensors, **options):
    dx, _, state = golden.backward(*tensors, **options)
    always = rebound(golden, offset_weight=offset_always_added)
    return dx, always.backward(*tensors, **options)[1], state


def zeros(*results):
    return tuple(None if t is None else torch.zeros_like(t) for t in results)


FAULTS = [
    # 1e-4 in the square moves rstd by half of it, 400 ulp in FP32: every value downstream shows.
    Fault(
        "square_plus_1e-4",
        plant(
            OPERATOR,
            rebound(
                golden, inverse_rms=rebound(norm, row_dot=row_dot_of_shifted_squares).inverse_rms
            ),
        ),
        {**EVERYTHING_ACCURATE, "backend_equal": ALL},
    ),
    # A name of the caller: rstd does not depend on it, and no transform of the batch does.
    Fault(
        "swish_means_sigmoid",
        replace(plant(OPERATOR, golden), scalars=tuple(map(swish_means_sigmoid, OPERATOR.scalars))),
        {
            "forward_accuracy": "y",
            "gradient_accuracy": "dx dgate dweight",
            "backend_equal": "y dx dgate dweight",
        },
        dtype="bfloat16",
    ),
    # dweight = sum(dy * xhat * act) holds no offset.
    Fault(
        "offset_dropped",
        plant(OPERATOR, rebound(golden, offset_weight=lambda w, offset: w.float())),
        {
            "forward_accuracy": "y",
            "gradient_accuracy": "dx dgate",
            "backend_equal": "y dx dgate",
        },
        dtype="bfloat16",
    ),
    # Right at their defaults: only another value tells.
    Fault(
        "eps_ignored",
        plant(OPERATOR, rebound(golden, inverse_rms=lambda x, eps: norm.inverse_rms(x, 1e-6))),
        {
            "forward_accuracy": "y rstd",
            "gradient_accuracy": "dx dgate dweight",
            "backend_equal": "y rstd dx dgate dweight",
        },
    ),
    Fault(
        "offset_quantised",
        plant(
            OPERATOR,
            rebound(golden, offset_weight=lambda w, o: norm.offset_weight(w, float(o != 0.0))),
        ),
        {
            "forward_accuracy": "y",
            "gradient_accuracy": "dx dgate",
            "backend_equal": "y dx dgate",
        },
    ),
    # With an offset of 1 by default, a weight of -0.0 must not turn the sign of y.
    Fault(
        "offset_dropped_zero_centred",
        plant(ZERO_CENTRED, rebound(norm, offset_weight=lambda w, offset: w.float())),
        {
            "forward_accuracy": "y",
            "gradient_accuracy": "dx",
            "backend_equal": "y dx",
            "special_values": "y",
        },
        dtype="bfloat16",
    ),
    # x*x is the lane's own fma, and y is products alone: only dx and dgate have a mul and an add.
    Fault("contraction", plant(OPERATOR, contracted()), {"backend_equal": "dx dgate"}),
    # Right values by other operations: bits alone can tell.
    Fault(
        "mean_by_reciprocal",
        plant(
            OPERATOR,
            rebound(golden, inverse_rms=rebound(norm, divide=reciprocal_divide).inverse_rms),
        ),
        {"backend_equal": ALL},
    ),
    # 0.0 + -0.0 = +0.0: no other value of a weight tells this from the contract.
    Fault(
        "dgate_adds_offset_always",
        plant(OPERATOR, rebound(golden, backward=backward_of_offset_always_added)),
        {"special_values": "dgate"},
        dtype="bfloat16",
    ),
    # Zeros are invariant, repeatable and order-free: accuracy and bits must catch them.
    Fault(
        "zeros",
        plant(
            OPERATOR,
            rebound(
                golden,
                forward=changed(golden.forward, zeros),
                backward=changed(golden.backward, zeros),
            ),
        ),
        {**EVERYTHING_ACCURATE, "backend_equal": ALL, "special_values": ALL},
        dtype="bfloat16",
    ),
    # All-zero BF16 gradients pass the public ceiling alone if they are small; ours must not.
    Fault(
        "zero_dweight",
        plant(OPERATOR, rebound(golden, column_sums=lambda c: norm.column_sums(c[:0]))),
        {
            "gradient_accuracy": "dweight",
            "backend_equal": "dweight",
            "special_values": "dweight",
        },
        dtype="bfloat16",
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_gates_planted_fault_turn_exactly_its_records_red(fault):
    assert red(fault.records()) == fault.expected


def by_name(name):
    return next(fault for fault in FAULTS if fault.name == name)


def failed_configs(fault, judgment, tensor):
    return {
        r.config
        for r in fault.records()
        if (r.judgment, r.tensor, r.status) == (judgment, tensor, "failed")
    }


def test_square_plus_1e_4_every_rstd_case_is_red():
    records = by_name("square_plus_1e-4").records()
    cases = [r for r in records if (r.judgment, r.tensor) == ("forward_accuracy", "rstd")]
    assert len(cases) == 6
    assert all(r.status == "failed" and "ulp at RMS" in r.reason for r in cases)


def test_swish_meaning_sigmoid_leaves_the_other_names_green():
    configs = failed_configs(by_name("swish_means_sigmoid"), "forward_accuracy", "y")
    assert configs == {"activation=swish"}


def test_dgate_offset_always_added_fails_the_negative_zero_test_alone():
    configs = failed_configs(by_name("dgate_adds_offset_always"), "special_values", "dgate")
    assert configs == {"negative_zero_parameter"}
