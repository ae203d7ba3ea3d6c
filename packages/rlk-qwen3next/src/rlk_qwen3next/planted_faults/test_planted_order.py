# SPDX-License-Identifier: Apache-2.0
"""Faults of order: sums that depend on the batch, on the arrangement of rows or on the run."""

import pytest
import torch

from rlk.operator import FLOATS
from rlk.reduce import exact_sum
from rlk.reduce.row_sum import golden as row_sum
from rlk.test_support.sabotage import Fault, plant, rebound, red
from rlk_qwen3next.rms_norm import golden as norm
from rlk_qwen3next.rms_norm_gated import golden
from rlk_qwen3next.rms_norm_gated.operator import OPERATOR

# 16: a batch with fewer rows than this is "small" to a tuned kernel.
SMALL_BATCH = 16
# 256: from here on a tuned kernel takes its large tiles.
LARGE_BATCH = 256
small_chunks = rebound(row_sum, LANE_TERMS=4, CHUNK=128)


def row_dot_small_chunks(a, b):
    return (small_chunks if len(a) < SMALL_BATCH else row_sum).row_dot(a, b)


def row_dot_small_chunks_of_many(a, b):
    return (small_chunks if len(a) >= LARGE_BATCH else row_sum).row_dot(a, b)


def column_sums_in_pairs_of_many(rows):
    if len(rows) < LARGE_BATCH:
        return exact(*rows)
    even, odd = rows[: len(rows) // 2 * 2].view(-1, 2, rows.shape[1]).unbind(1)
    return exact(*(even + odd), *rows[len(rows) // 2 * 2 :])


def row_dot_split(a, b):
    if len(a) >= SMALL_BATCH:
        return row_sum.row_dot(a, b)
    return row_sum.row_dot(a[:, 0::2], b[:, 0::2]) + row_sum.row_dot(a[:, 1::2], b[:, 1::2])


def fold(rows):
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
    return total


def tree(rows):
    while len(rows) > 1:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, len(rows) % 2))
        rows = rows[0::2] + rows[1::2]
    return rows[0]


generator = torch.Generator().manual_seed(0)


def fold_in_random_order(rows):
    return fold(rows[torch.randperm(len(rows), generator=generator)])


def exact(*rows):
    return exact_sum.add_rows(exact_sum.new(rows[0].shape[0]), torch.stack(rows), backend="golden")


def with_column_sums(column_sums):
    return plant(OPERATOR, rebound(golden, column_sums=column_sums))


def forgetful_backward(*tensors, needs, **scalars):
    """Exact when only dweight is wanted, an FP32 fold when other gradients are."""
    inexact = rebound(golden, column_sums=lambda rows: exact(fold(rows)))
    return (golden if needs == {"weight"} else inexact).backward(*tensors, needs=needs, **scalars)


INEXACT = dict.fromkeys(("gradient_invariance", "order_free", "backend_equal"), "dweight")

FAULTS = [
    # The small batch is seen by calls of up to 15 rows, never by 33 hashed or 59 oracle rows.
    Fault(
        "block_size_from_row_count",
        plant(
            OPERATOR,
            rebound(golden, inverse_rms=rebound(norm, row_dot=row_dot_small_chunks).inverse_rms),
        ),
        {
            "forward_invariance": "y rstd",
            "gradient_invariance": "dx dgate dweight",
            "order_free": "dweight",
        },
    ),
    # No other call of the gates has that many rows: the sweep of the full tier, and order_free.
    Fault(
        "block_size_from_256_rows",
        plant(
            OPERATOR,
            rebound(
                golden,
                inverse_rms=rebound(norm, row_dot=row_dot_small_chunks_of_many).inverse_rms,
            ),
        ),
        {
            "forward_invariance": "y rstd",
            "gradient_invariance": "dx dgate",
            "order_free": "dweight",
        },
        tier="full",
    ),
    Fault(
        "dweight_in_pairs_from_256_rows",
        with_column_sums(column_sums_in_pairs_of_many),
        {"order_free": "dweight"},
    ),
    # Only dx takes a row sum of gradients.
    Fault(
        "row_sum_of_dx_split_by_batch",
        plant(
            OPERATOR,
            rebound(golden, input_gradient=rebound(norm, row_dot=row_dot_split).input_gradient),
        ),
        {"gradient_invariance": "dx"},
    ),
    # Rounding errors of an FP32 sum are within the contract: accuracy must stay green.
    Fault(
        "dweight_split_by_batch",
        with_column_sums(lambda rows: exact(*map(fold, rows.split(SMALL_BATCH)))),
        INEXACT,
    ),
    Fault(
        "dweight_plain_tree",
        with_column_sums(lambda rows: exact(tree(rows))),
        INEXACT,
    ),
    # States are judged, not their roundings: order shows in narrow dtypes as well.
    *(
        Fault(
            f"dweight_plain_fold_{dtype}",
            with_column_sums(lambda rows: exact(fold(rows))),
            INEXACT,
            dtype,
        )
        for dtype in FLOATS
    ),
    # As FP32 atomics: beside the above, every gate that runs one thing twice.
    Fault(
        "dweight_in_random_order",
        with_column_sums(lambda rows: exact(fold_in_random_order(rows))),
        {**INEXACT, "repeatable": "dweight", "layout": "dweight"},
    ),
    # The state alone is right; what autograd hands out is not its rounding.
    Fault(
        "dweight_exact_only_alone",
        plant(OPERATOR, rebound(golden, backward=forgetful_backward)),
        INEXACT,
    ),
    # Twice the sum in every arrangement: the value is wrong, and order cannot show it.
    Fault(
        "dweight_counted_twice",
        with_column_sums(lambda rows: exact_sum.merge(exact(*rows), exact(*rows))),
        {"gradient_accuracy": "dweight", "backend_equal": "dweight"},
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_gates_planted_fault_turn_exactly_its_records_red(fault):
    assert red(fault.records()) == fault.expected
