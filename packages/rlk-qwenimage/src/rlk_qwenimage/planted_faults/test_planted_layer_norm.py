# SPDX-License-Identifier: Apache-2.0
"""Faults of layer_norm_modulate, and exactly the records that each turns red."""

from dataclasses import replace

import pytest
import torch

from rlk.gates import golden_hashes
from rlk.launch import record
from rlk.math.golden import fma
from rlk.operator import Workload
from rlk.reduce import exact_sum
from rlk.reduce.row_sum import golden as row_sum
from rlk.test_support.sabotage import Fault, changed, plant, rebound, red
from rlk_qwenimage.layer_norm_modulate import golden
from rlk_qwenimage.layer_norm_modulate.operator import OPERATOR

# Narrow rows: no fault below depends on the model's length, and gates are then ten times as fast.
NARROW = replace(
    OPERATOR, workloads=(Workload("narrow", {"T": 9, "S": 3, "N": 264}),), odd_sizes=()
)
RESULTS = "out mean rstd dx dscale dshift"
# 16: from so many tokens on a tuned kernel takes another order.
MANY_TOKENS = 16
small_chunks = rebound(row_sum, LANE_TERMS=4, CHUNK=128)


def planted(**steps):
    return plant(NARROW, rebound(golden, **steps))


def tree(rows):
    while len(rows) > 1:
        rows = torch.nn.functional.pad(rows.movedim(0, -1), (0, len(rows) % 2)).movedim(-1, 0)
        rows = rows[0::2] + rows[1::2]
    return rows[0]


def written(sums, memory):
    return sums if memory is None else memory.copy_(sums)


def token_sums_by_tree(terms, dtype, memory=None):
    return written(tree(terms.movedim(1, 0)).to(dtype), memory)


def token_sums_by_tree_of_many(terms, dtype, memory=None):
    by = token_sums_by_tree if terms.shape[1] > MANY_TOKENS else golden.token_sums
    return by(terms, dtype, memory)


def token_sums_over_all_samples(terms, dtype, memory=None):
    rows = terms.flatten(0, 1)
    state = exact_sum.add_rows(exact_sum.new(rows.shape[1]), rows, backend="golden")
    sums = exact_sum.round(state, dtype, backend="golden").expand(len(terms), -1)
    return written(sums, memory)


def token_sums_rounded_twice(terms, dtype, memory=None):
    return written(golden.token_sums(terms, torch.float32).half().to(dtype), memory)


def statistics_of_many_in_small_chunks(x, eps):
    chosen = small_chunks if len(x) > MANY_TOKENS else row_sum
    return rebound(golden, row_sum=chosen.row_sum, row_dot=chosen.row_dot).statistics(x, eps)


def input_gradient_of_many_in_small_chunks(g, xhat, rstd):
    chosen = small_chunks if len(g) > MANY_TOKENS else row_sum
    steps = rebound(golden, row_sum=chosen.row_sum, row_dot=chosen.row_dot)
    return steps.input_gradient(g, xhat, rstd)


def statistics_padding_inputs(x, eps):
    """0 - mean of padded columns counts."""
    columns = x.shape[1]
    mean = golden.row_mean(row_sum.row_sum(x), columns)
    padded = torch.nn.functional.pad(x, (0, -columns % 256))
    centred = padded - mean[:, None]
    variance = golden.row_mean(row_sum.row_dot(centred, centred), columns)
    root = golden.sqrt(variance + eps)
    return mean, golden.divide(torch.ones_like(root), root)


def statistics_offset(x, eps):
    mean, rstd = golden.statistics(x, eps)
    return mean, golden.statistics(x, eps + 1e-3)[1]


def contracted(xhat, scale, shift):
    factor = golden.factor(scale).expand_as(xhat)
    return fma(xhat, factor.contiguous(), shift.float()[:, None].expand_as(xhat).contiguous())


def factor_in_the_dtype_of_scale(scale):
    return (1.0 + scale).float()[:, None]


def swapped(xhat, scale, shift):
    return golden.modulate(xhat, shift, scale)


def modulation_of_the_first_sample(xhat, scale, shift):
    return golden.modulate(xhat, scale[:1].expand_as(scale), shift[:1].expand_as(shift))


def modulation_of_seven_tokens_alone(xhat, scale, shift):
    out = golden.modulate(xhat, scale, shift)
    return torch.where(torch.arange(xhat.shape[1])[:, None] < 7, out, xhat)


def contiguous_strides(tensor):
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape).stride())


def forward_ignoring_x_strides(x, *rest, **options):
    return golden.forward(contiguous_strides(x), *rest, **options)


def backward_ignoring_dout_strides(dout, *rest, **options):
    return golden.backward(contiguous_strides(dout), *rest, **options)


def forward_swapping_samples(x, *rest, **options):
    # Within the memory there is: the other samples are read where a contiguous batch has none.
    moved = x.stride(0) != x.shape[1] * x.stride(1)
    return golden.forward(x.flip(0) if moved else x, *rest, **options)


def forward_aliasing_one_sample(x, *rest, **options):
    out, mean, rstd = golden.forward(x, *rest, **options)
    return (out if len(x) > 1 else x.copy_(out)), mean, rstd


def backward_scribbling_on_dout(dout, *rest, **options):
    results = golden.backward(dout, *rest, **options)
    dout[0, 0, 0] += 1
    return results


def claim_to_be_triton(kernel, source_file):
    record("triton", kernel, "")


def scale_widened(dx, dscale, dshift):
    return dx, None if dscale is None else dscale.float(), dshift


def zeros(*results):
    return tuple(None if t is None else torch.zeros_like(t) for t in results)


@pytest.fixture(scope="module", autouse=True)
def hashes_of_narrow_rows(tmp_path_factory):
    """Golden hashes of the narrow operator, in place of the recorded ones."""
    file = tmp_path_factory.mktemp("hashes") / golden_hashes.FILE_NAME
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(golden_hashes, "path", lambda operator: file)
        golden_hashes.write(planted())
        yield


SUMS = "dscale dshift"
GRADIENTS = "dx dscale dshift"
WRONG = {"forward_accuracy": "out", "backend_equal": "out"}
STATISTICS = {
    "forward_accuracy": "out rstd",
    "gradient_accuracy": "dx dscale",
    "backend_equal": "out rstd dx dscale",
}
EVERY = (
    "forward_accuracy", "gradient_accuracy", "forward_invariance", "gradient_invariance",
    "repeatable", "order_free", "backend_equal", "layout", "special_values",
)  # fmt: skip

FAULTS = [
    Fault("nothing", planted(), {}),
    # 6020 in place of 6030: within the contract, so accuracy stays green.
    Fault(
        "token_sums_by_tree",
        planted(token_sums=token_sums_by_tree),
        {"order_free": SUMS, "backend_equal": SUMS},
    ),
    # No call of the gates but those of tokens as rows has that many.
    Fault(
        "token_sums_by_tree_of_many",
        planted(token_sums=token_sums_by_tree_of_many),
        {"order_free": SUMS},
    ),
    Fault(
        "token_sums_over_all_samples",
        planted(token_sums=token_sums_over_all_samples),
        {"gradient_accuracy": SUMS, "gradient_invariance": SUMS, "backend_equal": SUMS,
         "special_values": "dscale"},
    ),
    Fault(
        "token_sums_rounded_twice",
        planted(token_sums=token_sums_rounded_twice),
        # Sums of many tokens are beyond FP16: nothing finite is left to compare.
        {"gradient_accuracy": SUMS, "backend_equal": SUMS, "order_free": "dshift"},
        dtype="bfloat16",
    ),
    Fault(
        "statistics_of_many_in_small_chunks",
        planted(statistics=statistics_of_many_in_small_chunks),
        {"forward_invariance": "out mean rstd", "gradient_invariance": "dx dscale",
         "backend_equal": "out mean rstd dx dscale"},
    ),
    Fault(
        "input_gradient_of_many_in_small_chunks",
        planted(input_gradient=input_gradient_of_many_in_small_chunks),
        {"gradient_invariance": "dx", "backend_equal": "dx"},
    ),
    Fault("padding_of_inputs_counts", planted(statistics=statistics_padding_inputs), STATISTICS),
    Fault("variance_plus_a_thousandth", planted(statistics=statistics_offset), STATISTICS),
    Fault("contraction", planted(modulate=contracted), {"backend_equal": "out"}),
    Fault(
        "factor_rounded_to_bfloat16",
        planted(factor=factor_in_the_dtype_of_scale),
        {"forward_accuracy": "out", "gradient_accuracy": "dx", "backend_equal": "out dx"},
        dtype="bfloat16",
    ),
    Fault("scale_and_shift_swapped", planted(modulate=swapped), WRONG),
    Fault(
        "modulation_of_the_first_sample",
        planted(modulate=modulation_of_the_first_sample),
        {**WRONG, "forward_invariance": "out"},
    ),
    # Samples of the gates have three tokens: only their view as rows sees the eighth.
    Fault(
        "modulation_of_seven_tokens_alone",
        planted(modulate=modulation_of_seven_tokens_alone),
        {"forward_invariance": "out"},
    ),
    Fault(
        "x_strides_ignored",
        planted(forward=forward_ignoring_x_strides),
        {"layout": "out mean rstd dx dscale"},
    ),
    Fault(
        "dout_strides_ignored",
        planted(backward=backward_ignoring_dout_strides),
        {"layout": "dx dscale dshift"},
    ),
    Fault(
        "stride_of_samples_ignored",
        planted(forward=forward_swapping_samples),
        {"layout": "out mean rstd dx dscale"},
    ),
    Fault(
        "output_of_one_sample_is_its_input",
        planted(forward=forward_aliasing_one_sample),
        {"layout": "x out"},
    ),
    Fault("dout_written_into", planted(backward=backward_scribbling_on_dout), {"layout": "dout"}),
    # A finite sum of nothing is not told from zero by its NaN.
    Fault(
        "zeros",
        planted(
            forward=changed(golden.forward, zeros), backward=changed(golden.backward, zeros)
        ),
        {"forward_accuracy": "out mean rstd", "gradient_accuracy": GRADIENTS,
         "backend_equal": RESULTS, "special_values": "out mean rstd dx dscale"},
    ),
    # In a dtype that is not its own, out has no gradient: every case raises.
    Fault(
        "out_in_float32",
        planted(forward=changed(golden.forward, lambda out, *saved: (out.float(), *saved))),
        dict.fromkeys(EVERY, ""),
        dtype="bfloat16",
    ),
    Fault(
        "dscale_in_float32",
        planted(backward=changed(golden.backward, scale_widened)),
        {"layout": "dscale"},
        dtype="bfloat16",
    ),
    Fault(
        "another_name_under_golden",
        planted(start_golden=claim_to_be_triton),
        {
            "forward_accuracy": "out mean rstd",
            "gradient_accuracy": GRADIENTS,
            "forward_invariance": "out mean rstd",
            "gradient_invariance": GRADIENTS,
            "repeatable": RESULTS,
            "order_free": SUMS,
            "backend_equal": RESULTS,
            "layout": f"{RESULTS} x scale shift dout",
            "special_values": RESULTS,
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_gates_planted_fault_turn_exactly_its_records_red(fault):
    assert red(fault.records()) == fault.expected
