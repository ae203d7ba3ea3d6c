# SPDX-License-Identifier: Apache-2.0
"""What a backend sees of leading axes."""

from dataclasses import replace

import pytest
import torch

from rlk.operator import FLOATS, Tensor
from rlk.rows import are_views, as_rows
from rlk.test_support import tiny_operator

X = Tensor("x", ("...", "N"), FLOATS, gradient="row")
ONE = tiny_operator("tiny")
TWO = replace(ONE, row_axes=("B", "S"))


@pytest.mark.parametrize(
    ("shape", "one", "two"),
    [
        ((5,), (1, 5), (1, 1, 5)),
        ((4, 5), (4, 5), (1, 4, 5)),
        ((3, 4, 5), (12, 5), (3, 4, 5)),
        ((2, 3, 4, 5), (24, 5), (6, 4, 5)),
        ((2, 0, 4, 0), (0, 0), (0, 4, 0)),
    ],
)
def test_rows_of_any_leading_axes_have_those_of_the_operator(shape, one, two):
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    for operator, expected in ((ONE, one), (TWO, two)):
        (rows,) = as_rows(operator, (X,), (tensor,))
        assert rows.shape == expected
        assert torch.equal(rows.flatten(), tensor.flatten())


def test_rows_on_two_axes_that_no_one_stride_describes_are_views():
    tensor = torch.zeros(4, 3, 5).transpose(0, 1)
    assert not are_views(as_rows(ONE, (X,), (tensor,)), (tensor,))
    assert are_views(as_rows(TWO, (X,), (tensor,)), (tensor,))


def test_rows_repeated_over_several_leading_axes_are_views():
    tensor = torch.zeros(4, 5).expand(2, 3, 4, 5)
    (rows,) = as_rows(TWO, (X,), (tensor,))
    assert are_views((rows,), (tensor,))
    assert rows.stride() == (0, 5, 1)
