# SPDX-License-Identifier: Apache-2.0
"""Parts of one output, and the gradients that belong to them."""

import pytest
import torch

from rlk.compare import assert_same_bits
from rlk.parts import cut_like, tensors_in


def test_tensors_in_nested_tuples_come_in_their_order():
    a, b, c = torch.arange(3.0).unbind()
    assert [float(t) for t in tensors_in(((a, (b,)), c))] == [0, 1, 2]
    assert tensors_in(a)[0] is a


def test_cut_like_parts_gradient_is_that_of_the_whole():
    whole = torch.randn(3, 12, requires_grad=True)
    dy = torch.randn(3, 12)
    parts = whole.unflatten(-1, (4, 3)).unbind(-2)
    (found,) = torch.autograd.grad(parts, whole, cut_like([dy], parts))
    assert_same_bits(found, dy, "gradient")


def test_cut_like_as_many_outputs_as_gradients_are_not_cut():
    a, b = torch.randn(2), torch.randn(2)
    assert cut_like([a, b], [b, a]) == (a, b)
    with pytest.raises(ValueError, match="too many values to unpack"):
        cut_like([a, b], [a])
