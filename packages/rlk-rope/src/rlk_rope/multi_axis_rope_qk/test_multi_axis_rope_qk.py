# SPDX-License-Identifier: Apache-2.0
"""What is special to two tensors: one launch, the bits of two calls."""

import pytest
import torch

from rlk import trace
from rlk.compare import assert_same_bits
from rlk.errors import ArgumentError
from rlk_rope import multi_axis_rope, multi_axis_rope_qk


def both(rope, dtype, heads, key_heads, columns=16, pairs=4):
    q = rope.normal(2, 5, heads, columns, dtype=dtype)
    k = rope.normal(2, 5, key_heads, columns, dtype=dtype, seed=1)
    dq, dk = rope.normal(*q.shape, dtype=dtype, seed=2), rope.normal(*k.shape, dtype=dtype, seed=3)
    return q, k, dq, dk, *rope.tables(2, 5, pairs)


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (16, 2), (3, 1), (1, 9)])
def test_query_and_key_have_the_bits_of_two_calls(
    rope, backend, dtype, interleaved, rounding, heads, key_heads
):
    q, k, dq, dk, cos, sin = both(rope, dtype, heads, key_heads)
    options = {
        "interleaved": interleaved, "rounding": rounding, "rotary_dim": 8, "backend": backend,
    }  # fmt: skip
    leaves = [t.requires_grad_() for t in (q, k)]
    outputs = multi_axis_rope_qk(*leaves, cos, sin, **options)
    gradients = torch.autograd.grad(outputs, leaves, (dq, dk))
    for x, dy, y, dx in zip((q, k), (dq, dk), outputs, gradients, strict=True):
        one = rope.run(multi_axis_rope, x, dy, cos, sin, **options)
        rope.assert_same((y.detach(), dx), one)


def test_query_and_key_take_one_launch_in_each_direction(rope, backend):
    q, k, dq, dk, cos, sin = both(rope, "float32", 4, 2)
    leaves = [t.requires_grad_() for t in (q, k)]
    with trace() as launches:
        outputs = multi_axis_rope_qk(*leaves, cos, sin, rotary_dim=8, backend=backend)
        torch.autograd.grad(outputs, leaves, (dq, dk))
    assert [launch.direction for launch in launches] == ["forward", "backward"]


@pytest.mark.parametrize("wanted", [0, 1])
def test_gradient_of_one_tensor_alone_has_the_bits_of_both(rope, backend, wanted):
    q, k, dq, dk, cos, sin = both(rope, "bfloat16", 4, 2)
    leaf = (q, k)[wanted].requires_grad_()
    outputs = multi_axis_rope_qk(q, k, cos, sin, rotary_dim=8, backend=backend)
    (dx,) = torch.autograd.grad(outputs[wanted], leaf, (dq, dk)[wanted])
    one = rope.run(multi_axis_rope, leaf, (dq, dk)[wanted], cos, sin, rotary_dim=8)
    assert_same_bits(dx, one[1], "gradient")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (torch.zeros(2, 5, 2, 8, dtype=torch.float16), "k must be float32 like q, got float16"),
        (torch.zeros(2, 5, 2, 6), "k must be [..., G, D] with D=8, got [2, 5, 2, 6]"),
        (torch.zeros(2, 4, 2, 8), "k must be [2, 5, G, 8] like q, got [2, 4, 2, 8]"),
    ],
)
def test_key_unlike_its_query_is_refused_by_name(key, message):
    with pytest.raises(ArgumentError) as caught:
        multi_axis_rope_qk(torch.zeros(2, 5, 4, 8), key, torch.zeros(5, 4), torch.zeros(5, 4))
    assert str(caught.value).startswith(f"multi_axis_rope_qk: {message.partition(' like')[0]}")
