# SPDX-License-Identifier: Apache-2.0
"""Only what is special to demo: core tests every declared operator."""

import torch

from rlk.compare import assert_same_bits
from rlk_demo import demo


def test_demo_rows_of_ones_halve_the_weight():
    # A mean square of 1 gives a damping of 1/2, exactly.
    weight = torch.linspace(-1, 1, 257)
    y = demo(torch.ones(3, 257), weight)
    assert_same_bits(y, (weight / torch.full_like(weight, 2)).expand(3, 257).contiguous())


def test_dweight_rows_of_ones_count_the_rows():
    weight = torch.ones(5, requires_grad=True)
    demo(torch.ones(3, 5), weight).sum().backward()
    assert_same_bits(weight.grad, torch.full((5,), 1.5))
