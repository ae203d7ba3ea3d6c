# SPDX-License-Identifier: Apache-2.0
"""Faults of a rotary embedding, and exactly the records that each turns red."""

import pytest
import torch

from rlk.gates.transforms import CHUNK_ROWS
from rlk.launch import record
from rlk.math.golden import fma, negate
from rlk.test_support.sabotage import Fault, changed, plant, rebound, red
from rlk_rope.multi_axis_rope import golden
from rlk_rope.multi_axis_rope.operator import OPERATOR
from rlk_rope.multi_axis_rope_qk import golden as golden_qk
from rlk_rope.multi_axis_rope_qk.operator import OPERATOR as OPERATOR_QK

JUDGMENTS = (
    "forward_accuracy", "gradient_accuracy", "forward_invariance", "gradient_invariance",
    "repeatable", "backend_equal", "layout", "special_values",
)  # fmt: skip
# 16: a sequence with fewer tokens than this is "short" to a tuned kernel.
SHORT = 16
WRONG = {"forward_accuracy": "y", "gradient_accuracy": "dx", "backend_equal": "y dx"}


def planted(**steps):
    return plant(OPERATOR, rebound(golden, **steps))


def turning(rotate):
    """The operator with another rotation in both directions."""
    return planted(rotate=rotate)


def contracted(first, second, c, s, inverse):
    if inverse:
        return fma(first, c, second * s), fma(second, c, negate(first * s))
    return fma(first, c, negate(second * s)), fma(first, s, second * c)


def contracted_where_short(first, second, c, s, inverse):
    short = first.shape[1] < SHORT
    return (contracted if short else golden.separate)(first, second, c, s, inverse)


def cosine_in_bfloat16(x, cos, sin, *options, inverse):
    return golden.rotate(x, cos.bfloat16().float(), sin, *options, inverse=inverse)


def never_inverse(x, cos, sin, *options, inverse):
    return golden.rotate(x, cos, sin, *options, inverse=False)


def always_split(x, cos, sin, interleaved, *options, inverse):
    return golden.rotate(x, cos, sin, False, *options, inverse=inverse)


def always_separate(x, cos, sin, interleaved, rounding, *, inverse):
    return golden.rotate(x, cos, sin, interleaved, "separate", inverse=inverse)


def tables_of_the_first_sample(x, cos, sin, *options, inverse):
    cos, sin = (t[:1].expand_as(t) for t in (cos, sin))
    return golden.rotate(x, cos, sin, *options, inverse=inverse)


class PositionsFromTheChunk:
    """Tables are known from a long call on; a chunk takes their first rows, whatever it is of."""

    def __init__(self):
        self.known = {}

    def rotate(self, x, cos, sin, *options, inverse):
        tokens, pairs = cos.shape[1:]
        if tokens > CHUNK_ROWS:
            self.known[pairs] = cos[:1], sin[:1]
        elif pairs in self.known:
            cos, sin = (t[:, :tokens] for t in self.known[pairs])
        return golden.rotate(x, cos, sin, *options, inverse=inverse)


def rest_left_out(x, cos, sin, *options, inverse):
    y = golden.rotate(x, cos, sin, *options, inverse=inverse)
    y[..., 2 * cos.shape[-1] :] = 0
    return y


def contiguous_strides(tensor):
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape).stride())


def forward_ignoring_x_strides(x, *tables, **options):
    return golden.forward(contiguous_strides(x), *tables, **options)


def forward_ignoring_the_stride_of_samples(x, *tables, **options):
    # Within the memory there is: the other sample is read where a contiguous batch has none.
    moved = x.stride(0) != x.shape[1] * x.stride(1)
    return golden.forward(x.flip(0) if moved else x, *tables, **options)


def backward_ignoring_dy_strides(dy, *tensors, **options):
    return golden.backward(contiguous_strides(dy), *tensors, **options)


def rotate_with_strides_of_cos_for_sin(x, cos, sin, *options, inverse):
    sin = sin.as_strided(sin.shape, torch.empty(sin.shape).stride())
    return golden.rotate(x, cos, sin, *options, inverse=inverse)


def forward_ignoring_offset(x, *tables, **options):
    return golden.forward(x.as_strided(x.shape, x.stride(), 0), *tables, **options)


def forward_aliasing_one_token(x, *tables, **options):
    (y,) = golden.forward(x, *tables, **options)
    return ((y if x.shape[1] > 1 else x.copy_(y)),)


def backward_scribbling_on_dy(dy, *tensors, **options):
    results = golden.backward(dy, *tensors, **options)
    dy[0, 0, 0, 0] += 1
    return results


def claim_to_be_triton(kernel, source_file):
    record("triton", kernel, "")


def zeros(*results):
    return tuple(None if t is None else torch.zeros_like(t) for t in results)


def key_as_it_is(q_out, k_out):
    return q_out, q_out.new_zeros(()).expand_as(k_out).contiguous()


FAULTS = [
    # Within the contract: bits alone can tell.
    Fault("contraction", planted(separate=contracted), {"backend_equal": "y dx"}),
    Fault("complex_eager_ignored", turning(always_separate), {"backend_equal": "y dx"}),
    Fault("cosine_in_bfloat16", turning(cosine_in_bfloat16), WRONG),
    Fault("cosine_in_bfloat16_narrow", turning(cosine_in_bfloat16), WRONG, dtype="bfloat16"),
    # Where an infinity minus itself stands is part of the result.
    Fault(
        "gradient_turned_forward",
        turning(never_inverse),
        {"gradient_accuracy": "dx", "backend_equal": "dx", "special_values": "dx"},
    ),
    Fault("split_for_adjacent_pairs", turning(always_split), {**WRONG, "special_values": "y dx"}),
    Fault("rest_left_out", turning(rest_left_out), {**WRONG, "special_values": "y"}),
    # The values of one sequence are right; only another arrangement into calls tells.
    Fault(
        "tables_of_the_first_sample",
        turning(tables_of_the_first_sample),
        {"forward_invariance": "y", "gradient_invariance": "dx"},
    ),
    Fault(
        "positions_from_the_chunk",
        turning(PositionsFromTheChunk().rotate),
        {"forward_invariance": "y", "gradient_invariance": "dx"},
    ),
    Fault(
        "contraction_of_short_sequences",
        planted(separate=contracted_where_short),
        {"forward_invariance": "y", "gradient_invariance": "dx"},
    ),
    Fault("x_strides_ignored", planted(forward=forward_ignoring_x_strides), {"layout": "y"}),
    Fault(
        "stride_of_samples_ignored",
        planted(forward=forward_ignoring_the_stride_of_samples),
        {"layout": "y"},
    ),
    Fault("dy_strides_ignored", planted(backward=backward_ignoring_dy_strides), {"layout": "dx"}),
    Fault("sin_strides_ignored", turning(rotate_with_strides_of_cos_for_sin), {"layout": "y dx"}),
    Fault("storage_offset_ignored", planted(forward=forward_ignoring_offset), {"layout": "y"}),
    # The gradient does not read x: it stays right.
    Fault(
        "one_token_output_is_its_input",
        planted(forward=forward_aliasing_one_token),
        {"layout": "x y"},
    ),
    Fault("dy_written_into", planted(backward=backward_scribbling_on_dy), {"layout": "dy"}),
    Fault(
        "zeros",
        planted(
            forward=changed(golden.forward, zeros), backward=changed(golden.backward, zeros)
        ),
        {**WRONG, "special_values": "y dx"},
        dtype="bfloat16",
    ),
    # In a dtype that is not its own, y has no gradient: every case raises.
    Fault(
        "y_in_float32",
        planted(forward=changed(golden.forward, lambda y: (y.float(),))),
        dict.fromkeys(JUDGMENTS, ""),
        dtype="bfloat16",
    ),
    Fault(
        "dx_in_float32",
        planted(backward=changed(golden.backward, lambda dx: (dx.float(),))),
        {"layout": "dx"},
        dtype="bfloat16",
    ),
    Fault(
        "another_name_under_golden",
        planted(start_golden=claim_to_be_triton),
        {
            "forward_accuracy": "y",
            "gradient_accuracy": "dx",
            "forward_invariance": "y",
            "gradient_invariance": "dx",
            "repeatable": "y dx",
            "backend_equal": "y dx",
            "layout": "y dx x cos sin dy",
            "special_values": "y dx",
        },
    ),
    # One of the two tensors of a launch.
    Fault(
        "key_left_out",
        plant(
            OPERATOR_QK, rebound(golden_qk, forward=changed(golden_qk.forward, key_as_it_is))
        ),
        {"forward_accuracy": "k_out", "backend_equal": "k_out", "special_values": "k_out"},
    ),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_gates_planted_fault_turn_exactly_its_records_red(fault):
    assert red(fault.records()) == fault.expected
