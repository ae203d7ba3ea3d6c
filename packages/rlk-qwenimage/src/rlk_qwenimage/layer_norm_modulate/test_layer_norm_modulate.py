# SPDX-License-Identifier: Apache-2.0
"""What is special to layer_norm_modulate: sums over tokens, samples without tokens, backends."""

import pytest
import torch

from rlk import interpreter, trace
from rlk.compare import assert_same_bits
from rlk.errors import ArgumentError
from rlk.execution import Execution
from rlk.gates.inputs import VALUES, fixture
from rlk.launch import launch_triton
from rlk.reduce.exact_sum import STATE_ROWS
from rlk_qwenimage import layer_norm_modulate
from rlk_qwenimage.layer_norm_modulate.operator import OPERATOR

NAMES = ("out", "mean", "rstd", "dx", "dscale", "dshift")
# One column; a part of a lane; part of a chunk and of two; tokens of more than one block.
SIZES = ((1, 1), (5, 37), (1, 129), (2, 300), (130, 3))
INTERPRETED = interpreter.enable_without_gpu()


def run(x, scale, shift, dout, backend=None):
    """out and the gradients by name."""
    leaves = [t.detach().requires_grad_() for t in (x, scale, shift)]
    out = layer_norm_modulate(*leaves, backend=backend)
    gradients = torch.autograd.grad(out, leaves, dout)
    return dict(zip(("out", "dx", "dscale", "dshift"), (out.detach(), *gradients), strict=True))


def every_result(batch, backend):
    """Outputs, saved state and gradients by name."""
    execution = Execution(OPERATOR)
    tensors, scalars = tuple(batch.inputs.values()), tuple(batch.scalars.values())
    results = execution.forward(*tensors, *scalars, backend)
    given = (*batch.upstream.values(), *tensors, *results[1:])
    gradients = execution.backward(*given, *scalars, True, True, True, backend)
    return dict(zip(NAMES, (*results, *gradients), strict=True))


def cancelling(tokens=6032):
    """Gradients [1, S, 2] of ones, the first and the last but one replaced by +-2^26."""
    dout = torch.ones(1, tokens, 2)
    dout[0, 0], dout[0, -2] = 2.0**26, -(2.0**26)
    return dout


@pytest.mark.skipif(not INTERPRETED, reason="needs triton's interpreter")
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", ["cancelling", "non_finite"])
def test_triton_every_result_equals_golden(size, kind, dtype):
    sizes = dict(zip("SN", size, strict=True))
    batch = fixture(OPERATOR, dtype, rows=2, sizes=sizes, seed=3, values=VALUES[kind])
    expected = every_result(batch, "golden")
    for name, tensor in every_result(batch, "triton").items():
        assert_same_bits(tensor, expected[name], f"{name} {size}")


def test_out_rows_of_two_values_are_shift_plus_and_minus_the_factor(backend):
    # Mean 3 and variance 4 without error: xhat is 1 and -1.
    x = torch.tensor([[[5.0, 1.0, 1.0, 5.0]]])
    scale, shift = torch.tensor([[0.5, 1.0, 2.0, -1.0]]), torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    out = layer_norm_modulate(x, scale, shift, 0.0, backend=backend)
    assert_same_bits(out, torch.tensor([[[2.5, 0.0, 0.0, 4.0]]]), "out")


def test_out_factor_of_a_narrow_scale_is_formed_in_fp32(backend):
    # 1 + 2^-12 is 1 in BF16; 2^12 times it less 2^12 is 1.
    x = torch.tensor([[[1.0, -1.0]]], dtype=torch.bfloat16)
    scale = torch.full((1, 2), 2.0**-12, dtype=torch.bfloat16)
    shift = torch.tensor([[-1.0, 1.0]], dtype=torch.bfloat16)
    out = layer_norm_modulate(x, scale, shift, 0.0, backend=backend)
    assert_same_bits(out, torch.tensor([[[2.0**-12, -(2.0**-12)]]], dtype=torch.bfloat16), "out")


def test_out_product_is_rounded_before_shift_is_added(backend):
    # (1 + 2^-12)^2 rounds to 1 + 2^-11: a fused step would leave 2^-24.
    step = 2.0**-12
    x = torch.tensor([[[1.0, -1.0]]]) * (1 + step)
    # rstd of variance (1 + 2^-12)^2 is 1 / (1 + 2^-12): xhat is exactly +-1 with eps 0.
    scale, shift = torch.full((1, 2), step), torch.full((1, 2), -(1 + step))
    out = layer_norm_modulate(x, scale, shift, 0.0, backend=backend)
    assert_same_bits(out, torch.tensor([[[0.0, -2 * (1 + step)]]]), "out")


def test_dshift_cancelling_tokens_keep_small_terms(backend):
    tokens = 6032
    x = torch.tensor([1.0, -1.0]).expand(1, tokens, 2)
    zeros = torch.zeros(1, 2)
    found = run(x, zeros, zeros, cancelling(tokens), backend)
    assert_same_bits(found["dshift"], torch.full((1, 2), 6030.0), "dshift")


def test_dscale_cancelling_tokens_keep_small_terms(backend):
    # xhat is 1 and -1 with eps 0.
    tokens = 6032
    x = torch.tensor([1.0, -1.0]).expand(1, tokens, 2)
    leaves = [t.requires_grad_() for t in (torch.zeros(1, 2), torch.zeros(1, 2))]
    out = layer_norm_modulate(x, *leaves, 0.0, backend=backend)
    dscale, dshift = torch.autograd.grad(out, leaves, cancelling(tokens))
    assert_same_bits(dscale, torch.tensor([[6030.0, -6030.0]]), "dscale")
    assert_same_bits(dshift, torch.full((1, 2), 6030.0), "dshift")


def test_dx_has_no_component_along_ones_and_xhat(backend):
    # Of dout = a + b * xhat nothing is left.
    x = torch.tensor([[[1.0, -1.0, 1.0, -1.0]]])
    zeros = torch.zeros(1, 4)
    found = run(x, zeros, zeros, 3.0 + 2.0 * x, backend)
    assert found["dx"].abs().max() <= 2.0**-18
    assert_same_bits(found["dshift"], torch.tensor([[5.0, 1.0, 5.0, 1.0]]), "dshift")


@pytest.mark.parametrize("shape", [(2, 0, 5), (0, 3, 5), (0, 0, 5), (0, 5)])
def test_no_tokens_give_empty_rows_and_zero_sums_without_a_launch(backend, shape):
    x, leading = torch.ones(shape), shape[:-2]
    scale, shift = torch.ones(*leading, 5), torch.ones(*leading, 5)
    with trace() as launches:
        found = run(x, scale, shift, torch.ones(shape), backend)
    assert launches == []
    assert found["out"].shape == found["dx"].shape == shape
    for name in ("dscale", "dshift"):
        assert_same_bits(found[name], torch.zeros(*leading, 5), name)


def test_no_columns_are_refused_by_name():
    wanted = r"layer_norm_modulate: x must be \[..., S, N\] with no empty row, got \[2, 3, 0\]"
    with pytest.raises(ArgumentError, match=wanted):
        layer_norm_modulate(torch.ones(2, 3, 0), torch.ones(2, 0), torch.ones(2, 0))


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
def test_samples_of_any_leading_axes_equal_flat_ones(backend, leading):
    count = torch.Size(leading).numel()
    batch = fixture(OPERATOR, "float32", rows=count, sizes={"S": 4, "N": 33}, seed=5)
    given = (*batch.inputs.values(), *batch.upstream.values())
    expected = run(*given, backend)
    shaped = [t.view(*leading, *t.shape[1:]) for t in given]
    for name, tensor in run(*shaped, backend).items():
        assert_same_bits(tensor.view(expected[name].shape), expected[name], name)


def test_one_token_results_own_their_memory(backend):
    batch = fixture(OPERATOR, "float32", rows=1, sizes={"S": 1, "N": 33}, seed=5)
    given = (*batch.inputs.values(), *batch.upstream.values())
    before = [t.clone() for t in given]
    found = run(*given, backend)
    storages = [t.untyped_storage().data_ptr() for t in (*given, *found.values())]
    assert len(set(storages)) == len(storages)
    for tensor, copy in zip(given, before, strict=True):
        assert_same_bits(tensor, copy, "given")
    # One term is its own sum, rounded.
    assert_same_bits(found["dshift"], given[3][:, 0], "dshift")


def test_scale_of_all_samples_expanded_equals_its_copies(backend):
    batch = fixture(OPERATOR, "bfloat16", rows=3, sizes={"S": 4, "N": 33}, seed=5)
    x, scale, shift = batch.inputs.values()
    dout = batch.upstream["out"]
    once = [scale[:1].expand_as(scale), shift[:, :1].expand_as(shift)]
    expected = run(x, *(t.contiguous() for t in once), dout, backend)
    for name, tensor in run(x, *once, dout[:, :1].expand_as(dout), backend).items():
        if name == "out":
            assert_same_bits(tensor, expected[name], name)
    found = run(x, *once, dout, backend)
    for name, tensor in found.items():
        assert_same_bits(tensor, expected[name], name)
        assert tensor.is_contiguous()


def test_nan_token_reaches_its_row_and_its_samples_dscale_alone(backend):
    batch = fixture(OPERATOR, "float32", rows=2, sizes={"S": 3, "N": 33}, seed=5)
    x, *rest = (*batch.inputs.values(), *batch.upstream.values())
    expected = run(x, *rest, backend)
    spoiled = x.clone()
    spoiled[1, 2, 7] = torch.nan
    found = run(spoiled, *rest, backend)
    for name in ("out", "dx"):
        assert found[name][1, 2].isnan().all()
        assert_same_bits(found[name].flatten(0, 1)[:5], expected[name].flatten(0, 1)[:5], name)
    assert found["dscale"][1].isnan().all()
    assert_same_bits(found["dscale"][0], expected["dscale"][0], "dscale")
    assert_same_bits(found["dshift"], expected["dshift"], "dshift")


@pytest.mark.skipif(not INTERPRETED, reason="needs triton's interpreter")
def test_triton_groups_of_samples_share_the_memory_of_one_groups_states(monkeypatch):
    from . import kernel_triton

    batch = fixture(OPERATOR, "float32", rows=7, sizes={"S": 3, "N": 5}, seed=5)
    expected = every_result(batch, "golden")
    used = []

    def launch(kernel, grid, *arguments, **options):
        if kernel is kernel_triton.layer_norm_modulate_sums:
            used.extend(state.untyped_storage().data_ptr() for state in arguments[4:6])
        launch_triton(kernel, grid, *arguments, **options)

    monkeypatch.setattr(kernel_triton, "launch_triton", launch)
    # Two samples a group, and one in the last.
    monkeypatch.setattr(kernel_triton, "STATE_BYTES", 2 * 2 * STATE_ROWS * 5 * 8)
    for name, tensor in every_result(batch, "triton").items():
        assert_same_bits(tensor, expected[name], name)
    assert (len(used), len(set(used))) == (8, 2)


def test_saved_state_is_two_statistics_of_a_token_beside_the_inputs():
    x, scale, shift = torch.randn(2, 5, 7), torch.randn(2, 7), torch.randn(2, 7)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer_norm_modulate(x.requires_grad_(), scale, shift)
    assert [list(t.shape) for t in kept] == [[2, 5, 7], [2, 7], [2, 7], [2, 5], [2, 5]]
