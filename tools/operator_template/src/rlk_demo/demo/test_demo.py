# SPDX-License-Identifier: Apache-2.0
"""The suite that core derives from the declaration, and what is special to demo."""

import torch

from rlk.compare import assert_same_bits
from rlk.pytest_plugin import OperatorSuite
from rlk_demo.demo import demo
from rlk_demo.demo.operator import OPERATOR


class TestOperator(OperatorSuite):
    operator = OPERATOR


def test_demo_rows_of_ones_halve_the_weight():
    # A mean square of 1 gives a damping of 1/2, exactly.
    weight = torch.linspace(-1, 1, 257)
    y = demo(torch.ones(3, 257), weight)
    assert_same_bits(y, (weight / torch.full_like(weight, 2)).expand(3, 257).contiguous())


def test_dweight_rows_of_ones_count_the_rows():
    weight = torch.ones(5, requires_grad=True)
    demo(torch.ones(3, 5), weight).sum().backward()
    assert_same_bits(weight.grad, torch.full((5,), 1.5))
