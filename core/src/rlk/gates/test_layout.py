# SPDX-License-Identifier: Apache-2.0
"""Layouts of rows that lie on two axes, as samples and tokens."""

import pytest

from rlk.gates.conftest import backward, forward


def backward_of_tokens(dy, x, weight, *, needs):
    """The backward of flat rows."""
    return backward(dy.flatten(0, 1), x.flatten(0, 1), weight, needs=needs)


def forward_of_a_contiguous_batch(x, weight):
    """Where the stride of samples is another one, the other sample is read."""
    moved = x.stride(0) != x.shape[1] * x.stride(1)
    return forward(x.flip(0) if moved else x, weight)


@pytest.fixture
def planted(scale):
    def operator(**steps):
        return scale.operator(backward=backward_of_tokens, row_axes=("B", "S"), **steps)

    return operator


def test_layout_of_samples_and_tokens_is_judged_with_their_axes_swapped(scale, planted):
    records = scale.records("layout", planted())
    assert {r.status for r in records} == {"passed"}
    shapes = {r.config: r.shape for r in records if r.tensor == "y"}
    assert shapes["swapped_inputs"] == [2, 7, 8]
    assert shapes["ownership_one_row"] == [1, 8]


def test_layout_stride_of_samples_that_is_ignored_is_red(scale, planted):
    records = scale.records("layout", planted(forward=forward_of_a_contiguous_batch))
    red = {r.config for r in records if r.status == "failed"}
    assert {"swapped_inputs", "transposed_inputs"} <= red
    assert {r.tensor for r in records if r.status == "failed"} == {"y"}
