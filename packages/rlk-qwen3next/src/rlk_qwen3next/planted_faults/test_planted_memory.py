# SPDX-License-Identifier: Apache-2.0
"""Faults of memory: strides, offsets, aliases, places, padding, dtypes, unwritten elements."""

from itertools import count

import pytest
import torch

from rlk.test_support.sabotage import Fault, changed, plant, rebound, red
from rlk_qwen3next.rms_norm import golden as norm
from rlk_qwen3next.rms_norm_gated import golden
from rlk_qwen3next.rms_norm_gated.operator import OPERATOR

# Every judgment of the golden row, for faults that make each case raise.
JUDGMENTS = (
    "forward_accuracy", "gradient_accuracy", "forward_invariance", "gradient_invariance",
    "repeatable", "order_free", "backend_equal", "layout", "special_values",
)  # fmt: skip
# Judgments of forward alone run no backward.
JUDGMENTS_WITH_BACKWARD = tuple(name for name in JUDGMENTS if not name.startswith("forward_"))


def planted(**steps):
    return plant(OPERATOR, rebound(golden, **steps))


def contiguous_strides(tensor):
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape).stride())


def backward_ignoring_dy_strides(dy, *tensors, **options):
    return golden.backward(contiguous_strides(dy), *tensors, **options)


def from_start_of_storage(tensor):
    return tensor.as_strided(tensor.shape, tensor.stride(), 0)


def forward_ignoring_offset(x, *tensors, **scalars):
    return golden.forward(from_start_of_storage(x), *tensors, **scalars)


def backward_ignoring_offset(dy, x, *tensors, **options):
    return golden.backward(dy, from_start_of_storage(x), *tensors, **options)


def forward_aliasing_one_row(x, *tensors, **scalars):
    y, rstd = golden.forward(x, *tensors, **scalars)
    return (y if len(x) > 1 else x.copy_(y)), rstd


def backward_scribbling_on_dy(dy, *tensors, **options):
    results = golden.backward(dy, *tensors, **options)
    dy[0, 0] += 1
    return results


def backward_returning_dy(dy, *tensors, **options):
    dx, *others = golden.backward(dy, *tensors, **options)
    return (dx if dx is None or len(dy) > 1 else dy.copy_(dx)), *others


def forward_leaking_nan(x, *tensors, **scalars):
    y, rstd = golden.forward(x, *tensors, **scalars)
    row_above_is_nan = x.roll(1, 0).isnan().any(1)
    return torch.where(row_above_is_nan[:, None], torch.nan, y), rstd


def last_row_unwritten(y, rstd):
    written = torch.empty_like(y)
    written[:-1] = y[:-1]
    return written, rstd


calls = count()


def one_ulp_now_and_then(y, rstd):
    y = y.contiguous()
    y.view(torch.int16).view(-1)[y.abs().argmin()] += next(calls) % 2
    return y, rstd


def digits_not_carried(contributions):
    state = norm.column_sums(contributions)
    state[0] += 1 << 32
    state[1] -= 1
    return state


def dx_doubled_alone(dx, dgate, state):
    alone = dgate is None and state is None
    return dx * 2 if alone else dx, dgate, state


def row_gradient_dtype(dx, dgate, state):
    return None if dx is None else dx.float(), dgate, state


FAULTS = [
    # A gradient as autograd often hands it out: a slice, a transpose, one expanded number.
    Fault(
        "dy_strides_ignored",
        planted(backward=backward_ignoring_dy_strides),
        {"layout": "dx dgate dweight"},
    ),
    Fault(
        "storage_offset_ignored",
        planted(forward=forward_ignoring_offset, backward=backward_ignoring_offset),
        {"layout": "y rstd dx dgate dweight"},
    ),
    # The input is spoilt for the backward of that one row: dweight of single rows shows it too.
    Fault(
        "one_row_output_is_its_input",
        planted(forward=forward_aliasing_one_row),
        {"layout": "x y", "order_free": "dweight"},
    ),
    # Under the full tier, batches of one row bring it to the invariance of gradients.
    Fault(
        "one_row_output_is_its_input_full",
        planted(forward=forward_aliasing_one_row),
        {"layout": "x y", "order_free": "dweight", "gradient_invariance": "dx dgate"},
        tier="full",
    ),
    # The results are right: every run has inputs of its own.
    Fault("dy_written_into", planted(backward=backward_scribbling_on_dy), {"layout": "dy"}),
    Fault(
        "one_row_dx_is_dy",
        planted(backward=backward_returning_dy),
        {"layout": "dy dx"},
    ),
    # Gradients do not read y.
    Fault(
        "rows_one_place_down",
        planted(forward=changed(golden.forward, lambda y, rstd: (y.roll(1, 0), rstd))),
        {
            "forward_accuracy": "y",
            "forward_invariance": "y",
            "backend_equal": "y",
            "special_values": "y",
        },
        dtype="bfloat16",
    ),
    Fault(
        "nan_leaks_to_the_row_below",
        planted(forward=forward_leaking_nan),
        {"backend_equal": "y", "special_values": "y"},
        dtype="bfloat16",
    ),
    # NaN padding is a matter of the full tier.
    Fault(
        "nan_leaks_to_the_row_below_full",
        planted(forward=forward_leaking_nan),
        {"forward_invariance": "y", "backend_equal": "y", "special_values": "y"},
        dtype="bfloat16",
        tier="full",
    ),
    Fault(
        "last_row_unwritten",
        planted(forward=changed(golden.forward, last_row_unwritten)),
        {
            "forward_accuracy": "y",
            "forward_invariance": "y",
            "backend_equal": "y",
            "special_values": "y",
        },
        dtype="bfloat16",
    ),
    # The smallest element in thousands, wrong by one ulp: accuracy cannot see it.
    Fault(
        "one_ulp_every_other_call",
        planted(forward=changed(golden.forward, one_ulp_now_and_then)),
        {
            "repeatable": "y",
            "forward_invariance": "y",
            "backend_equal": "y",
            "layout": "y",
            "special_values": "y",
        },
        dtype="bfloat16",
    ),
    # In a dtype that is not its own, y has no gradient: every case raises.
    Fault(
        "y_in_float32",
        planted(forward=changed(golden.forward, lambda y, rstd: (y.float(), rstd))),
        dict.fromkeys(JUDGMENTS, ""),
        dtype="bfloat16",
    ),
    # Autograd casts it to the right bits; only the operator's own backward shows it.
    Fault(
        "dx_in_float32",
        planted(backward=changed(golden.backward, row_gradient_dtype)),
        {"layout": "dx"},
        dtype="bfloat16",
    ),
    # As with frozen parameters: a path of its own, which all gradients together never take.
    Fault(
        "dx_wrong_when_alone",
        planted(backward=changed(golden.backward, dx_doubled_alone)),
        {"layout": "dx"},
        dtype="bfloat16",
    ),
    # The same sum: wrong only for those who add the states of many ranks.
    Fault(
        "state_not_normalised",
        planted(column_sums=digits_not_carried),
        {"gradient_invariance": "dweight", "order_free": "dweight"},
        dtype="bfloat16",
    ),
    Fault(
        "dgate_missing",
        planted(backward=changed(golden.backward, lambda dx, dgate, state: (dx, None, state))),
        dict.fromkeys(JUDGMENTS_WITH_BACKWARD, ""),
        dtype="bfloat16",
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_gates_planted_fault_turn_exactly_its_records_red(fault):
    assert red(fault.records()) == fault.expected
