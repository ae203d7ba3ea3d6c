# SPDX-License-Identifier: Apache-2.0
"""Where a tensor's elements lie in memory does not show, and nobody's memory is written to."""

import pytest
import torch

from rlk import trace
from rlk.compare import assert_same_bits
from rlk.gates.layout import LAYOUTS as FLAT

LEADING, N = (2, 3), 129


def swapped_leading_axes(tensor):
    # Two leading axes that no single stride describes.
    return tensor.transpose(0, 1).contiguous().transpose(0, 1) if tensor.dim() > 2 else tensor


def negative_bit(tensor):
    # What torch.imag returns of a conjugate, in any dtype.
    view = torch._neg_view(tensor * -1.0)
    assert view.is_neg()
    return view


LAYOUTS = {
    **FLAT,
    "swapped_leading_axes": swapped_leading_axes,
    "negative_bit": negative_bit,
}


def shaped(norm, dtype, leading=LEADING, n=N):
    """Inputs and dy of a random batch with several leading axes."""
    batch = norm.batch(dtype, rows=torch.Size(leading).numel(), n=n, seed=21)
    inputs = {k: t if k == "weight" else t.view(*leading, n) for k, t in batch.inputs.items()}
    return inputs, batch.upstream["y"].view(*leading, n)


def assert_same_run(actual, expected):
    for name, tensor in expected.items():
        assert_same_bits(actual[name], tensor, name)


@pytest.mark.parametrize("arrange", LAYOUTS)
def test_layout_of_any_tensor_leaves_every_bit(norm, backend, dtype, arrange):
    arrange = LAYOUTS[arrange]
    inputs, dy = shaped(norm, dtype)
    expected = norm.run(inputs, dy, backend)
    moved = {name: arrange(tensor) for name, tensor in inputs.items()}
    actual = norm.run(moved, arrange(dy), backend)
    assert_same_run(actual, expected)
    assert all(tensor.is_contiguous() for tensor in actual.values())


def test_outputs_of_rows_stored_by_column_are_contiguous(norm, backend, dtype):
    # One leading axis: the rows reach the backend as they lie, without a copy.
    inputs, dy = shaped(norm, dtype, (6,))
    expected = norm.run(inputs, dy, backend)
    moved = {name: FLAT["transposed"](tensor) for name, tensor in inputs.items()}
    assert not moved["x"].is_contiguous()
    actual = norm.run(moved, FLAT["transposed"](dy), backend)
    assert_same_run(actual, expected)
    assert all(tensor.is_contiguous() for tensor in actual.values())


def test_expanded_inputs_give_the_bits_of_their_copies(norm, backend):
    inputs, dy = shaped(norm, "float32")
    x = inputs["x"][:1, :1]
    inputs = {name: x.expand(*LEADING, N) if name != "weight" else t for name, t in inputs.items()}
    inputs["weight"] = inputs["weight"][:1].expand(N)
    copies = {name: tensor.contiguous() for name, tensor in inputs.items()}
    assert_same_run(norm.run(inputs, dy, backend), norm.run(copies, dy, backend))


def differentiate(norm, inputs, backend, loss):
    """Gradients of a loss of y, as autograd itself hands dy over."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    loss(norm.call(leaves.values(), backend)).backward()
    return {f"d{name}": tensor.grad for name, tensor in leaves.items()}


@pytest.mark.parametrize("loss", ["sum", "cat", "transpose", "flip"])
def test_gradient_in_the_layout_of_autograd_gives_the_bits_of_its_copy(norm, backend, loss):
    inputs, dy = shaped(norm, "float32")
    weights = torch.cat([dy, dy, dy], -1)
    losses = {
        "sum": lambda y: y.sum(),  # stride 0
        "cat": lambda y: (torch.cat([dy, y, dy], -1) * weights).sum(),  # narrow
        "transpose": lambda y: (y.transpose(0, -1) * dy.transpose(0, -1).contiguous()).sum(),
        "flip": lambda y: (y.flip(0) * dy.flip(0)).sum(),
    }
    copied = torch.ones_like(dy) if loss == "sum" else dy
    expected = norm.run(inputs, copied, backend)
    seen = []

    def watched(y):
        y.register_hook(lambda gradient: seen.append(gradient.stride()))
        return losses[loss](y)

    actual = differentiate(norm, inputs, backend, watched)
    for name, tensor in actual.items():
        assert_same_bits(tensor, expected[name], name)
    if loss != "flip":
        assert seen[0] != dy.stride()


@pytest.mark.parametrize("leading", [(0,), (0, 3), (2, 0), (2, 0, 3)])
def test_empty_batch_gives_empty_rows_and_zero_dweight_without_a_launch(norm, backend, leading):
    inputs, dy = shaped(norm, "bfloat16", leading)
    with trace() as launches:
        run = norm.run(inputs, dy, backend)
    # Only an empty state is rounded.
    assert [launch.kernel for launch in launches if "round" not in launch.kernel] == []
    assert_same_bits(run["dweight"], torch.zeros(N, dtype=torch.bfloat16), "dweight")
    for name in run.keys() - {"dweight"}:
        assert (run[name].shape, run[name].dtype) == ((*leading, N), torch.bfloat16)


def test_single_row_without_leading_axes_is_that_row(norm, backend):
    inputs, dy = shaped(norm, "float32")
    rows = norm.run({k: t if k == "weight" else t[1, 2:] for k, t in inputs.items()}, dy[1, 2:],
                    backend)  # fmt: skip
    bare = norm.run({k: t if k == "weight" else t[1, 2] for k, t in inputs.items()}, dy[1, 2],
                    backend)  # fmt: skip
    for name, tensor in bare.items():
        assert_same_bits(tensor, rows[name].view(tensor.shape), name)


def test_inputs_and_dy_after_both_passes_are_unwritten(norm, backend, dtype):
    inputs, dy = shaped(norm, dtype)
    given = {**inputs, "dy": dy}
    before = {name: tensor.clone() for name, tensor in given.items()}
    versions = {name: tensor._version for name, tensor in given.items()}
    norm.run(inputs, dy, backend)
    for name, tensor in given.items():
        assert_same_bits(tensor, before[name], name)
        assert tensor._version == versions[name]


@pytest.mark.parametrize("leading", [(1,), (2, 3)])
def test_outputs_of_fp32_rows_own_their_memory(norm, backend, leading):
    # FP32 with a neutral weight: where a shortcut would be to return an input.
    inputs, dy = shaped(norm, "float32", leading)
    inputs["weight"] = torch.ones(N)
    run = norm.run(inputs, dy, backend)
    storages = [t.untyped_storage().data_ptr() for t in (*inputs.values(), dy, *run.values())]
    assert len(set(storages)) == len(storages)


def test_outputs_may_be_written_to_in_place(norm, backend):
    inputs, dy = shaped(norm, "float32")
    expected = norm.run(inputs, dy * torch.full_like(dy, 2.0), backend)
    leaves = [tensor.detach().requires_grad_() for tensor in inputs.values()]
    y = norm.call(leaves, backend)
    y *= 2.0
    gradients = torch.autograd.grad(y, leaves, dy)
    for (name, tensor), gradient in zip(inputs.items(), gradients, strict=True):
        assert_same_bits(gradient, expected[f"d{name}"], f"d{name}")
        gradient += tensor
