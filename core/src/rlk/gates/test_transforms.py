# SPDX-License-Identifier: Apache-2.0
"""Arrangements cover the rows they say, and restoring notices every wrong key."""

import pytest
import torch

from rlk.gates.inputs import SAMPLE_LENGTHS
from rlk.gates.transforms import (
    PADDING,
    Arrangement,
    Call,
    chunked,
    gather,
    restore,
    short_matrix,
)

ROWS = torch.arange(59.0)[:, None] * torch.ones(3)  # [59, 3], row i holds i
NAN = torch.tensor(float("nan"))


def calls(arrangement, change=lambda result: result):
    return [change(gather(ROWS, call, NAN)) for call in arrangement.calls]


def test_short_matrix_of_four_samples_has_thirteen_configurations():
    names = [a.name for a in short_matrix(SAMPLE_LENGTHS)]
    assert names == [
        "canonical",
        "chunked_7",
        *(f"singleton_{i}" for i in range(4)),
        *(f"singleton_{i}_chunked_7" for i in range(4)),
        "permuted_2_0_3_1",
        "right_padded_20",
        "left_padded_20",
    ]


@pytest.mark.parametrize("arrangement", short_matrix(SAMPLE_LENGTHS), ids=lambda a: a.name)
def test_restore_identity_gives_the_canonical_rows(arrangement):
    restored, faults = restore(arrangement, calls(arrangement))
    assert faults == []
    assert torch.equal(restored, ROWS[list(arrangement.covered)])


def test_short_matrix_samples_are_packed_permuted_and_padded_as_named():
    by_name = {a.name: a for a in short_matrix(SAMPLE_LENGTHS)}
    assert by_name["canonical"].covered == tuple(range(59))
    # Samples start at 0, 11, 27 and 40.
    assert by_name["singleton_2"].calls == (Call(tuple(range(27, 40)), (13,)),)
    assert [len(c.rows) for c in by_name["singleton_3_chunked_7"].calls] == [7, 7, 5]
    assert [by_name["permuted_2_0_3_1"].calls[0].rows[i] for i in (0, 13, 24, 43)] == [
        27,
        0,
        40,
        11,
    ]
    right, left = (by_name[f"{side}_padded_20"].calls[0] for side in ("right", "left"))
    assert right.leading == left.leading == (4, 20)
    assert right.rows[:12] == (*range(11), PADDING)
    assert left.rows[8:20] == (PADDING, *range(11))


def test_gather_padded_call_fills_nobodys_rows_alone():
    (call,) = short_matrix(SAMPLE_LENGTHS)[-1].calls
    padded = gather(ROWS, call, NAN)
    assert padded.shape == (4, 20, 3)
    assert padded.isnan().sum() == (4 * 20 - 59) * 3


def test_restore_missing_row_is_a_fault():
    torn = Arrangement("torn", (Call((0, 2), (2,)), Call((1,), (1,))))
    restored, faults = restore(torn, [ROWS[[0, 2]], torch.zeros(2, 3)])
    assert faults == ["result has shape [2, 3], call [1]", "rows [1] are missing"]
    assert torch.equal(restored, ROWS[[0, 2]])


def test_restore_row_twice_is_a_fault():
    twice = Arrangement("twice", (Call((0, 1), (2,)), Call((1,), (1,))))
    assert restore(twice, calls(twice))[1] == ["row 1 came back twice"]


def test_restore_wrong_leading_axes_is_a_fault_without_rows():
    arrangement = chunked("chunks", range(4), 2)
    restored, faults = restore(arrangement, calls(arrangement, lambda result: result[:1]))
    assert faults[:2] == ["result has shape [1, 3], call [2]"] * 2
    assert faults[2:] == ["rows [0, 1, 2, 3] are missing"]
    assert restored.numel() == 0
