# SPDX-License-Identifier: Apache-2.0
"""Faults of the modulated last norm, and exactly the records that each turns red."""

from types import SimpleNamespace

import pytest

from rlk.math.golden import fma
from rlk.test_support.sabotage import Fault, plant, rebound, red
from rlk.test_support.tiny import ascending
from rlk_qwenimage.adaln_mod_projection import golden as projection
from rlk_qwenimage.final_adaln_out.composition import Composition
from rlk_qwenimage.final_adaln_out.operator import OPERATOR
from rlk_qwenimage.layer_norm_modulate import golden as norm


def planted(**changes):
    """The operator of golden's norm with some of its steps changed."""
    both = Composition(projection, rebound(norm, **changes))
    return plant(OPERATOR, SimpleNamespace(forward=both.forward, backward=both.backward))


def forward_shift_first(x, scale, shift, *, eps):
    return norm.forward(x, shift, scale, eps=eps)


def backward_shift_first(dout, x, scale, shift, *saved, eps, needs):
    dx, dscale, dshift = norm.backward(dout, x, scale, shift, *saved, eps=eps, needs=needs)
    return dx, dshift, dscale


def contracted(xhat, scale, shift):
    return fma(xhat, norm.factor(scale).expand_as(xhat), shift.float()[:, None].expand_as(xhat))


def sums_in_fp32(terms, dtype):
    return ascending(terms.movedim(1, 0)).to(dtype)


def factor_of_narrow_numbers(scale):
    """1 + scale rounded to the dtype of scale."""
    return (1 + scale)[:, None].float()


FAULTS = (
    Fault(
        "shift and scale swapped",
        planted(forward=forward_shift_first),
        {"forward_accuracy": "out", "backend_equal": "out"},
    ),
    Fault(
        "gradients of shift and scale swapped",
        planted(backward=backward_shift_first),
        {
            "gradient_accuracy": "dtemb dweight dbias",
            "backend_equal": "dtemb dweight dbias",
            # NaN arrives in the other half.
            "special_values": "dweight dbias",
        },
    ),
    Fault(
        "contraction of the modulation",
        planted(modulate=contracted),
        {"backend_equal": "out"},
    ),
    Fault(
        "tokens summed in FP32",
        planted(token_sums=sums_in_fp32),
        {
            "order_free": "dbias",
            "backend_equal": "dtemb dweight dbias",
        },
    ),
    Fault(
        "1 + scale rounded to BF16",
        planted(factor=factor_of_narrow_numbers),
        {
            "forward_accuracy": "out",
            "gradient_accuracy": "dx",
            "backend_equal": "out dx",
        },
        dtype="bfloat16",
    ),
)


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_fault_turns_exactly_its_records_red(fault):
    assert red(fault.records()) == fault.expected
