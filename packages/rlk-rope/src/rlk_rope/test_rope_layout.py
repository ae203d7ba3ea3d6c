# SPDX-License-Identifier: Apache-2.0
"""Where elements lie in memory does not show, is not changed, and costs no copy."""

import pytest
import torch

from rlk import dispatch, trace
from rlk.compare import assert_same_bits
from rlk.test_support.layouts import columns_first, shifted, spread
from rlk_rope import multi_axis_rope
from rlk_rope.multi_axis_rope import golden
from rlk_rope.multi_axis_rope.operator import OPERATOR

B, S, H, D, P = 2, 5, 3, 16, 8


def packed(x):
    """One of query, key and value of a fused projection."""
    memory = torch.empty(B, S, 3, H, D, dtype=x.dtype)
    return memory[:, :, 1].copy_(x)


def heads_first(x):
    """BSHD view of [B, H, S, D]: no single stride describes its tokens."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def narrow(x):
    """A part of wider heads."""
    return torch.empty(*x.shape[:-1], D + 5, dtype=x.dtype)[..., 3 : 3 + D].copy_(x)


def negative_bit(x):
    """What torch.imag returns of a conjugate."""
    return torch._neg_view(x * -1.0)


LAYOUTS = (packed, heads_first, spread, columns_first, shifted, narrow, negative_bit)


@pytest.fixture
def call(rope, backend):
    """x, dy, tables of each sample, and the results of contiguous tensors."""
    x, dy = (
        rope.normal(B, S, H, D, dtype="bfloat16"),
        rope.normal(B, S, H, D, dtype="bfloat16", seed=1),
    )
    tables = rope.tables(B, S, P)
    return x, dy, tables, rope.run(multi_axis_rope, x, dy, *tables, backend=backend)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_input_and_gradient_leaves_every_bit(rope, backend, call, layout):
    x, dy, tables, expected = call
    found = rope.run(multi_axis_rope, layout(x), layout(dy), *tables, backend=backend)
    rope.assert_same(found, expected)


@pytest.mark.parametrize("sizes", [(1, S, H, D), (B, 1, H, D), (B, S, 1, D), (B, S, H, 1)])
def test_input_repeated_along_an_axis_gives_the_bits_of_its_copy(rope, backend, call, sizes):
    x, dy, tables, _ = call
    part = tuple(slice(size) for size in sizes)
    x, dy = (t[part].expand(B, S, H, D) for t in (x, dy))
    copies = [t.contiguous() for t in (x, dy)]
    expected = rope.run(multi_axis_rope, *copies, *tables, backend=backend)
    rope.assert_same(rope.run(multi_axis_rope, x, dy, *tables, backend=backend), expected)


def test_tables_of_unlike_strides_give_the_bits_of_their_copies(rope, backend, call):
    x, dy, (cos, sin), expected = call
    both = torch.stack((cos, sin), -1)
    strided = both[..., 0], sin.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    rope.assert_same(rope.run(multi_axis_rope, x, dy, *strided, backend=backend), expected)


def test_tables_of_all_samples_equal_their_copies_for_each(rope, backend, call):
    x, dy, (cos, sin), _ = call
    shared, each = (cos[0], sin[1]), (cos[:1].expand_as(cos).contiguous(), sin[1:].expand_as(sin))
    found = rope.run(multi_axis_rope, x, dy, *shared, backend=backend)
    rope.assert_same(found, rope.run(multi_axis_rope, x, dy, *each, backend=backend))


@pytest.mark.parametrize("loss", ["sum", "cat", "transpose", "flip"])
def test_gradient_in_the_layout_of_autograd_gives_the_bits_of_its_copy(rope, backend, call, loss):
    x, dy, tables, _ = call
    weights = torch.cat([dy, dy, dy], -1)
    losses = {
        "sum": lambda y: y.sum(),  # stride 0
        "cat": lambda y: (torch.cat([dy, y, dy], -1) * weights).sum(),  # narrow
        "transpose": lambda y: (y.transpose(1, 3) * dy.transpose(1, 3).contiguous()).sum(),
        "flip": lambda y: (y.flip(0) * dy.flip(0)).sum(),
    }
    leaf = x.detach().requires_grad_()
    losses[loss](multi_axis_rope(leaf, *tables, backend=backend)).backward()
    given = torch.ones_like(dy) if loss == "sum" else dy
    expected = rope.run(multi_axis_rope, x, given, *tables, backend=backend)
    assert_same_bits(leaf.grad, expected[1], "dx")


@pytest.mark.parametrize("shape", [(0, S, H, D), (B, 0, H, D), (0, 0, H, D), (0, H, D)])
def test_empty_batch_or_sequence_gives_empty_results_without_a_launch(rope, backend, shape):
    x, (cos, sin) = torch.zeros(shape), rope.tables(*shape[:-2], P)
    with trace() as launches:
        results = rope.run(multi_axis_rope, x, x, cos, sin, backend=backend)
        shared = multi_axis_rope(x, *rope.tables(shape[-3], P), backend=backend)
    assert [t.shape for t in (*results, shared)] == [shape] * 3
    assert launches == []


@pytest.mark.parametrize("leading", [(), (7,), (2, 3, 4), (1, 2, 1, 3)])
def test_any_number_of_leading_axes_equals_one_sequence(rope, backend, leading):
    x, (cos, sin) = rope.normal(*leading, H, D), rope.tables(*leading, P)
    tokens = torch.Size(leading).numel()
    found = rope.run(multi_axis_rope, x, x, cos, sin, backend=backend)
    flat = [t.reshape(1, tokens, *t.shape[len(leading) :]) for t in (x, x, cos, sin)]
    expected = rope.run(multi_axis_rope, *flat, backend=backend)
    rope.assert_same([t.view(1, tokens, H, D) for t in found], expected)


def test_inputs_after_both_passes_are_unwritten_and_results_own_their_memory(rope, backend):
    x, dy, (cos, sin) = rope.normal(1, 1, H, D), rope.normal(1, 1, H, D, seed=1), rope.tables(1, P)
    given = (x, dy, cos, sin)
    before, versions = [t.clone() for t in given], [t._version for t in given]
    results = rope.run(multi_axis_rope, *given, backend=backend)
    for tensor, copy, version in zip(given, before, versions, strict=True):
        assert_same_bits(tensor, copy, "given")
        assert tensor._version == version
    storages = [t.untyped_storage().data_ptr() for t in (*given, *results)]
    assert len(set(storages)) == len(storages)


@pytest.mark.parametrize("layout", [packed, heads_first, spread, columns_first, shifted, narrow])
def test_backend_sees_the_memory_of_its_caller(rope, monkeypatch, layout):
    seen = {}

    def watched(direction):
        function = getattr(golden, direction)

        def call(*tensors, **options):
            seen[direction] = [(t.data_ptr(), t.stride()) for t in tensors]
            return function(*tensors, **options)

        return call

    for direction in ("forward", "backward"):
        monkeypatch.setattr(golden, direction, watched(direction))
    dispatch.forget_plans()
    x, dy = layout(rope.normal(B, S, H, D)), layout(rope.normal(B, S, H, D, seed=1))
    cos, sin = rope.tables(S, P)
    rope.run(multi_axis_rope, x, dy, cos, sin, backend="golden")
    dispatch.forget_plans()
    tables = [(t.data_ptr(), (0, P, 1)) for t in (cos, sin)]
    assert seen["forward"] == [(x.data_ptr(), x.stride()), *tables]
    # Backward reads no value of x: it is handed the gradient in its place.
    assert seen["backward"] == [(dy.data_ptr(), dy.stride())] * 2 + tables


def test_input_of_a_call_is_not_kept_for_its_gradient(rope):
    x = rope.normal(B, S, H, D).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        multi_axis_rope(x, *rope.tables(S, P))
    assert [t.shape for t in saved] == [(B, S, P)] * 2


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_call_with_shared_tables_has_the_bits_of_eager(rope, interleaved, compiler):
    torch._dynamo.reset()
    x, (cos, sin) = packed(rope.normal(B, S, H, D)), rope.tables(S, P)
    dy = heads_first(rope.normal(B, S, H, D, seed=1))
    compiled = torch.compile(multi_axis_rope, fullgraph=True, backend=compiler)
    options = {"interleaved": interleaved, "rotary_dim": 2 * P}
    found = rope.run(compiled, x, dy, cos, sin, **options)
    rope.assert_same(found, rope.run(multi_axis_rope, x, dy, cos, sin, **options))
    torch._dynamo.reset()


def test_exported_call_with_shared_tables_serves_other_batches(rope):
    class Turn(torch.nn.Module):
        def forward(self, x, cos, sin):
            return multi_axis_rope(x, cos, sin, interleaved=False)

    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    dynamic = ({0: batch, 1: length}, {0: length}, {0: length})
    example = (rope.normal(B, S, H, D), *rope.tables(S, P))
    program = torch.export.export(Turn(), example, dynamic_shapes=dynamic)
    for shape in ((3, 7, H, D), (5, 2, H, D)):
        given = (rope.normal(*shape), *rope.tables(shape[1], P))
        assert_same_bits(program.module()(*given), Turn()(*given), "y")


def test_operator_declares_no_saved_state_and_no_reduction():
    assert (OPERATOR.saved, OPERATOR.reductions, OPERATOR.linear) == ((), (), True)
