# SPDX-License-Identifier: Apache-2.0
"""Faults of provenance: other code than asked for, code that does not say what it is, none."""

from dataclasses import replace

import pytest

from rlk import backends
from rlk.launch import record
from rlk.operator import Backend
from rlk.test_support.sabotage import Fault, plant, rebound, red
from rlk_qwen3next.rms_norm_gated import golden
from rlk_qwen3next.rms_norm_gated.operator import OPERATOR

FORWARD = {"forward_accuracy": "y rstd", "forward_invariance": "y rstd"}
BACKWARD = {
    "gradient_accuracy": "dx dgate dweight",
    "gradient_invariance": "dx dgate dweight",
    "order_free": "dweight",
}
WHOLE = "y rstd dx dgate dweight"
BOTH = dict.fromkeys(("repeatable", "backend_equal", "special_values"), WHOLE)
# Ownership also looks at what was given.
BACKWARD_RUNS = {**BACKWARD, **BOTH, "layout": f"{WHOLE} x gate weight dy"}
EVERY_RECORD = {**FORWARD, **BACKWARD_RUNS}
EVERY_CASE = dict.fromkeys(EVERY_RECORD, "")
# Judgments of forward alone run no backward.
EVERY_CASE_WITH_BACKWARD = dict.fromkeys(BACKWARD_RUNS, "")


def other_row(load):
    """A row of another name, wherever golden would run too."""
    return Backend("other", load, platforms=("cpu", "nvidia"))


def claim_to_be_triton(kernel, source_file):
    record("triton", kernel, "")


def silent(kernel, source_file):
    pass


def forward_unreported(*tensors, **scalars):
    return rebound(golden, start_golden=silent).forward(*tensors, **scalars)


def fail(*tensors, **options):
    raise RuntimeError("an illegal memory access was encountered")


def fail_with_lookup(*tensors, **options):
    raise KeyError("swish")


def fail_on_odd_rows(dy, *tensors, **options):
    return fail() if len(dy) % 2 else golden.backward(dy, *tensors, **options)


FAULTS = [
    Fault(
        "golden_under_another_name",
        replace(OPERATOR, backends=(other_row(lambda: golden), backends.golden(lambda: golden))),
        EVERY_RECORD,
    ),
    Fault(
        "another_name_under_golden",
        plant(OPERATOR, rebound(golden, start_golden=claim_to_be_triton)),
        EVERY_RECORD,
    ),
    # One direction on another backend is a silent fallback all the same.
    Fault(
        "backward_on_another_backend",
        plant(
            OPERATOR,
            rebound(golden, backward=rebound(golden, start_golden=claim_to_be_triton).backward),
        ),
        BACKWARD_RUNS,
    ),
    Fault(
        "forward_unreported",
        plant(OPERATOR, rebound(golden, forward=forward_unreported)),
        EVERY_RECORD,
    ),
    Fault("forward_raises", plant(OPERATOR, rebound(golden, forward=fail)), EVERY_CASE),
    Fault(
        "backward_raises", plant(OPERATOR, rebound(golden, backward=fail)), EVERY_CASE_WITH_BACKWARD
    ),
    Fault("lookup_fails", plant(OPERATOR, rebound(golden, forward=fail_with_lookup)), EVERY_CASE),
    # Hashes of 33 rows, 59 canonical, 131 oracle, 9 special and 7 rearranged rows: all odd.
    Fault(
        "odd_rows_raise",
        plant(OPERATOR, rebound(golden, backward=fail_on_odd_rows)),
        EVERY_CASE_WITH_BACKWARD,
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_gates_planted_fault_turn_exactly_its_records_red(fault):
    assert red(fault.records()) == fault.expected
