# SPDX-License-Identifier: Apache-2.0
"""What is special to rms_norm_residual: the rounded sum, and one gradient for both of its terms."""

import pytest
import torch

from rlk import trace
from rlk.compare import assert_same_bits
from rlk.errors import ArgumentError
from rlk.math.golden import fma
from rlk.reduce.row_sum import golden as row_sum
from rlk.test_support.sabotage import Fault, plant, rebound, red
from rlk_qwen3next import RMSNorm, rms_norm, rms_norm_residual
from rlk_qwen3next.rms_norm import golden as norm
from rlk_qwen3next.rms_norm_residual import golden
from rlk_qwen3next.rms_norm_residual.operator import OPERATOR

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (1, 131, 264)
small_chunks = rebound(row_sum, LANE_TERMS=4, CHUNK=128)


def inputs(dtype, n, rows=5, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + n)
    made = [torch.randn(rows, n, generator=generator).to(dtype) for _ in range(4)]
    return made, torch.randn(n, generator=generator).to(dtype)


def gradients(x, residual, weight, upstream, backend):
    """y, residual_out and the three gradients; an upstream gradient of None is missing."""
    leaves = [t.detach().requires_grad_() for t in (x, residual, weight)]
    outputs = rms_norm(leaves[0], leaves[2], residual=leaves[1], backend=backend)
    used = [(o, g) for o, g in zip(outputs, upstream, strict=True) if g is not None]
    found = torch.autograd.grad([o for o, _ in used], leaves, [g for _, g in used])
    return *(o.detach() for o in outputs), *found


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_equal_a_rounded_sum_and_the_plain_norm_of_it(backend, dtype, n):
    (x, residual, dy, dsum), weight = inputs(dtype, n)
    y, total, dx, dresidual, dweight = gradients(x, residual, weight, (dy, dsum), backend)
    # torch adds narrow dtypes in FP32 and rounds once, as FP32 itself.
    assert_same_bits(total, x + residual, "residual_out")
    leaves = [total.clone().requires_grad_(), weight.clone().requires_grad_()]
    plain = rms_norm(*leaves, backend=backend)
    assert_same_bits(y, plain.detach(), "y")
    alone = torch.autograd.grad(plain, leaves, dy)
    assert_same_bits(dweight, alone[1], "dweight")
    assert_same_bits(dresidual, dx, "dresidual")
    # Added before the one rounding: in FP32 that is the sum of what both ways give.
    if dtype == torch.float32:
        assert_same_bits(dx, alone[0] + dsum, "dx")


def test_sum_that_its_dtype_cannot_hold_is_rounded_before_the_norm(backend):
    # 256 + 1 is 256 in BF16: a norm of the unrounded sum would see rows of unlike elements.
    x = torch.tensor([[256.0, 256.0, 256.0, 256.0]], dtype=torch.bfloat16)
    residual = torch.tensor([[1.0, 0.0, 1.0, 0.0]], dtype=torch.bfloat16)
    weight = torch.ones(4)
    y, total = rms_norm_residual(x, residual, weight, 0.0, backend=backend)
    assert_same_bits(total, x, "residual_out")
    assert_same_bits(y, torch.ones(1, 4, dtype=torch.bfloat16), "y")


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_missing_output_gradient_counts_as_zeros(backend, dtype, missing):
    (x, residual, dy, dsum), weight = inputs(dtype, 131)
    upstream = [dy, dsum]
    upstream[missing] = None
    given = [torch.zeros_like(dy) if g is None else g for g in upstream]
    found = gradients(x, residual, weight, upstream, backend)
    expected = gradients(x, residual, weight, given, backend)
    for actual, wanted in zip(found, expected, strict=True):
        assert_same_bits(actual, wanted)
    if missing == 0:
        # Nothing but the sum was used: its gradient passes through.
        assert_same_bits(found[2], dsum, "dx")
        assert_same_bits(found[4], torch.zeros_like(weight), "dweight")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("n", [131, 264])
@pytest.mark.parametrize("used", ["y", "residual_out", "both"])
def test_output_gradients_on_a_gpu_have_the_bits_of_golden_in_one_buffer(backend, n, used):
    (x, residual, dy, dsum), weight = inputs(torch.bfloat16, n, rows=37)
    upstream = [dy if used != "residual_out" else None, dsum if used != "y" else None]
    expected = gradients(x, residual, weight, upstream, "golden")
    placed = [None if g is None else g.cuda() for g in upstream]
    found = gradients(x.cuda(), residual.cuda(), weight.cuda(), placed, backend)
    names = ("y", "residual_out", "dx", "dresidual", "dweight")
    for name, actual, wanted in zip(names, found, expected, strict=True):
        assert_same_bits(actual, wanted, name)
    assert found[2].data_ptr() == found[3].data_ptr()


def test_dx_and_dresidual_share_one_buffer_of_the_backward(backend):
    (x, residual, dy, dsum), weight = inputs(torch.bfloat16, 264)
    *_, dx, dresidual, _ = gradients(x, residual, weight, (dy, dsum), backend)
    assert dx.data_ptr() == dresidual.data_ptr()
    leaves = [t.detach().requires_grad_() for t in (x, residual)]
    outputs = rms_norm_residual(*leaves, weight, backend=backend)
    torch.autograd.backward(outputs, [dy, dsum])
    # As .grad they may be written: autograd parts them.
    assert leaves[0].grad.data_ptr() != leaves[1].grad.data_ptr()
    assert_same_bits(leaves[0].grad, leaves[1].grad, "grad")


@pytest.mark.parametrize("wanted", ["x", "residual"])
def test_gradient_of_one_term_alone_has_the_same_bits(backend, wanted):
    (x, residual, dy, dsum), weight = inputs(torch.bfloat16, 131)
    expected = gradients(x, residual, weight, (dy, dsum), backend)[2]
    given = {"x": x, "residual": residual}
    leaf = given[wanted] = given[wanted].clone().requires_grad_()
    outputs = rms_norm_residual(*given.values(), weight, backend=backend)
    (found,) = torch.autograd.grad(outputs, leaf, [dy, dsum])
    assert_same_bits(found, expected, wanted)


def test_backward_keeps_the_sum_in_place_of_its_terms():
    (x, residual, _, _), weight = inputs(torch.bfloat16, 131)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y, total = rms_norm_residual(x.requires_grad_(), residual.requires_grad_(), weight)
    memory = {t.untyped_storage().data_ptr() for t in kept}
    assert total.untyped_storage().data_ptr() in memory
    assert not memory & {t.untyped_storage().data_ptr() for t in (x, residual, y)}
    # FP32 is one number for each row.
    assert [t.numel() for t in kept if t.dtype == torch.float32] == [5]


def test_residual_of_another_shape_or_dtype_is_refused_by_name():
    x, weight = torch.ones(2, 4), torch.ones(4)
    for residual, complaint in [
        (torch.ones(2, 5), "[..., N] with N=4, got [2, 5]"),
        (torch.ones(3, 4), "[2, 4] like x, got [3, 4]"),
        (torch.ones(2, 4).bfloat16(), "float32 like x, got bfloat16"),
    ]:
        with pytest.raises(ArgumentError) as caught:
            rms_norm(x, weight, residual=residual)
        assert str(caught.value) == f"rms_norm_residual: residual must be {complaint}"


def test_module_with_a_residual_returns_the_sum_too(backend):
    (x, residual, _, _), weight = inputs(torch.float32, 131)
    module = RMSNorm(131)
    with torch.no_grad():
        module.weight.copy_(weight)
    with trace() as launches:
        y, total = module(x, residual)
    assert {launch.operator for launch in launches} == {OPERATOR.name}
    expected = rms_norm_residual(x, residual, weight)
    assert_same_bits(y.detach(), expected[0], "y")
    assert_same_bits(total, expected[1], "residual_out")


def unrounded_forward(x, residual, weight, **scalars):
    """The norm of the sum that FP32 has, beside the rounded one."""
    _, residual_out, _ = golden.forward(x, residual, weight, **scalars)
    total = x.float() + residual.float()
    y, rstd = norm.normalise(total, weight, scalars["eps"], scalars["weight_offset"])
    return y.to(x.dtype), residual_out, rstd


def forward_in_place_of_one_row(x, residual, weight, **scalars):
    """As engines do it: the sum is written over the residual."""
    y, residual_out, rstd = golden.forward(x, residual, weight, **scalars)
    return y, (residual_out if len(x) > 1 else residual.copy_(residual_out)), rstd


def backward_without_the_sum(dy, dresidual_out, *tensors, **options):
    return golden.backward(dy, torch.zeros_like(dresidual_out), *tensors, **options)


def backward_rounding_twice(dy, dresidual_out, *tensors, **options):
    dx, state = backward_without_the_sum(dy, dresidual_out, *tensors, **options)
    return None if dx is None else dx + dresidual_out, state


def contracted_input_gradient(g, xhat, rstd):
    m = norm.divide(norm.row_dot(g, xhat), torch.full_like(rstd, g.shape[1]))
    return rstd[:, None] * fma(xhat * -1.0, m[:, None], g)


def planted(plain=None, **steps):
    plain = {} if plain is None else {"plain": rebound(norm, **plain)}
    return plant(OPERATOR, rebound(golden, **steps, **plain))


EVERYWHERE = "y rstd dx dresidual dweight"
FAULTS = [
    # BF16: what was not rounded is another number, within the tolerance of many.
    Fault(
        "sum_not_rounded_before_the_norm",
        planted(forward=unrounded_forward),
        {
            "forward_accuracy": "y rstd",
            "gradient_accuracy": "dx dresidual",
            "backend_equal": EVERYWHERE,
        },
        dtype="bfloat16",
    ),
    Fault(
        "gradient_of_the_sum_dropped",
        planted(backward=backward_without_the_sum),
        {"gradient_accuracy": "dx dresidual", "backend_equal": "dx dresidual"},
        dtype="bfloat16",
    ),
    Fault(
        "gradient_rounded_before_it_is_added",
        planted(backward=backward_rounding_twice),
        {"gradient_accuracy": "dx dresidual", "backend_equal": "dx dresidual"},
        dtype="bfloat16",
    ),
    Fault(
        "one_row_sum_is_its_residual",
        planted(forward=forward_in_place_of_one_row),
        {"layout": "residual residual_out"},
        dtype="bfloat16",
    ),
    # Right values by other operations: bits alone can tell.
    Fault(
        "tree_order_changed",
        planted(plain={"row_dot": small_chunks.row_dot}),
        {"backend_equal": EVERYWHERE},
    ),
    Fault(
        "contraction",
        planted(plain={"input_gradient": contracted_input_gradient}),
        {"backend_equal": "dx dresidual"},
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_gates_planted_fault_turn_exactly_its_records_red(fault):
    assert red(fault.records()) == fault.expected


def test_planted_operator_unchanged_is_green():
    assert red(Fault("none", planted(), {}, dtype="bfloat16").records()) == set()
