# SPDX-License-Identifier: Apache-2.0
"""Chains over rows, continued from call to call: the bits of one batch, or refused."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlk.compare import assert_same_bits, same_bits
from rlk.errors import ArgumentError, GradientError, RlkError
from rlk.exact_grad import ExactGradAccumulator
from rlk.test_support.exact_layouts import (
    CHAIN_ROWS,
    SCALARS,
    STEPS,
    Chain,
    chain_backward,
    chain_batch,
    chained,
)

WHOLE = [(0, CHAIN_ROWS)]
# A micro-batch that ends within a step, in front of another.
RAGGED = ((0, 32), (32, 63), (63, 80))


def expected_gradient(dtype=torch.float32):
    """Of one ordinary call on all rows."""
    model = Chain(dtype)
    x, dy = chain_batch()
    model(x.to(dtype)).backward(dy.to(dtype))
    return model.weight.grad


def block(model, **options):
    return ExactGradAccumulator(model, continue_chains=True, **options)


def continued(pieces, model=None, **options):
    model = model or Chain()
    with block(model, **options):
        chain_backward(model, pieces)
    return model.weight.grad


def test_chain_of_micro_batches_of_whole_steps_has_the_bits_of_one_call():
    expected, ordinary = expected_gradient(), Chain()
    chain_backward(ordinary, STEPS)
    assert not same_bits(ordinary.weight.grad, expected)
    for pieces in (WHOLE, STEPS, ((0, 64), (64, 80)), ((0, 32), (32, 80))):
        assert_same_bits(continued(pieces), expected, f"dweight {pieces}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_chain_of_a_narrow_weight_is_rounded_once_from_steps_of_sixteen(dtype):
    model, (x, dy) = Chain(dtype), chain_batch()
    with block(model):
        for start in range(0, CHAIN_ROWS, 16):
            model(x[start : start + 16].to(dtype)).backward(dy[start : start + 16].to(dtype))
    assert_same_bits(model.weight.grad, expected_gradient(dtype), "dweight")


@pytest.mark.parametrize("way", ["aot_eager", "inductor", "reentrant", "checkpoint"])
def test_chain_of_compiled_and_recomputed_calls_has_the_same_bits(way):
    torch._dynamo.reset()
    model = Chain()
    call = model
    if way in ("aot_eager", "inductor"):
        call = torch.compile(model, fullgraph=True, backend=way, dynamic=True)
    x, dy = chain_batch()
    sums = block(model)
    for _ in range(2):
        model.zero_grad()
        with sums:
            for start, stop in STEPS:
                rows = x[start:stop].clone().requires_grad_()
                if way in ("reentrant", "checkpoint"):
                    y = checkpoint(call, rows, use_reentrant=way == "reentrant")
                else:
                    y = call(rows)
                y.backward(dy[start:stop])
        assert_same_bits(model.weight.grad, expected_gradient(), f"dweight {way}")


def test_chain_of_backwards_behind_all_forwards_has_the_same_bits():
    model, (x, dy) = Chain(), chain_batch()
    with block(model), torch.autograd.graph.save_on_cpu():
        outputs = [(model(x[start:stop]), dy[start:stop]) for start, stop in STEPS]
        for y, gradient in outputs:
            y.backward(gradient)
    assert_same_bits(model.weight.grad, expected_gradient(), "dweight")


def test_chain_cut_within_a_step_is_refused_and_nothing_is_written():
    model = Chain()
    message = (
        "ExactGradAccumulator: every micro-batch but the last must have a multiple of 16 samples, "
        "of FP32 32, for a continued chain, got another for weight; leave continue_chains False"
    )
    with pytest.raises(GradientError) as caught:
        continued(RAGGED, model)
    assert str(caught.value) == message
    assert_same_bits(model.weight.grad, torch.zeros(5), "weight.grad")
    assert model.weight_chain is None


def test_chain_of_two_calls_in_one_graph_is_refused():
    model, (x, dy) = Chain(), chain_batch()
    sums = block(model).__enter__()
    (model(x[:32]) * dy[:32] + model(x[32:64]) * dy[32:64]).sum().backward()
    with pytest.raises(GradientError, match="must have one call in a graph, got several of weight"):
        sums.finalize()


def test_chain_through_an_empty_micro_batch_goes_on():
    pieces = ((0, 0), (0, 32), (32, 32), (32, 80), (80, 80))
    assert_same_bits(continued(pieces), expected_gradient(), "dweight")


def test_chain_that_was_killed_and_restarted_has_the_same_bytes():
    buffer, killed, model = io.BytesIO(), Chain(), Chain()
    with block(killed) as sums:
        chain_backward(killed, STEPS[:2])
        torch.save(sums.state_dict(), buffer)
        chain_backward(killed, STEPS[2:])
    buffer.seek(0)
    states = torch.load(buffer)
    assert list(states) == ["weight", "weight.calls"]
    with block(model) as sums:
        chain_backward(model, STEPS[:1])
        sums.load_state_dict(states)
        chain_backward(model, STEPS[2:])
    assert_same_bits(model.weight.grad, expected_gradient(), "dweight")


def test_chain_restarted_behind_a_part_of_a_step_is_refused():
    killed, model = Chain(), Chain()
    with block(killed) as sums:
        chain_backward(killed, RAGGED[:2])
        states = sums.state_dict()
    sums = block(model).__enter__()
    sums.load_state_dict(states)
    chain_backward(model, RAGGED[2:])
    with pytest.raises(GradientError, match="a multiple of 16 samples"):
        sums.finalize()


def test_chain_state_of_another_shape_is_refused():
    with block(Chain()) as sums:
        states = sums.state_dict()
        with pytest.raises(ArgumentError, match=r"weight must be float32 \[5\], got float64"):
            sums.load_state_dict({**states, "weight": states["weight"].double()})


def test_chain_quotient_is_divided_in_float32_and_main_grad_keeps_it():
    model = Chain(torch.bfloat16)
    sums = block(model, main_grad=True)
    with sums:
        chain_backward(model.float(), WHOLE)
        sums.finalize(divide_by=7)
    assert model.weight.grad is None
    expected = expected_gradient() / torch.full((5,), 7.0)
    assert_same_bits(model.weight.main_grad, expected, "main_grad")


def test_chain_without_the_option_is_ordinary_and_finished_in_every_call():
    model, ordinary = Chain(), Chain()
    with ExactGradAccumulator(model) as sums:
        assert model.weight_chain is None
        chain_backward(model, STEPS)
    chain_backward(ordinary, STEPS)
    assert_same_bits(model.weight.grad, ordinary.weight.grad, "dweight")
    assert sums.report().ordinary == ("weight",)


def test_report_of_continued_chains_says_what_their_bits_depend_on():
    report = block(nn.Sequential(Chain(), nn.Linear(2, 2, bias=False))).report()
    assert (report.chain, report.ordinary) == (("0.weight",), ("1.weight",))
    assert str(report) == (
        "0.weight  chain: bits of one batch if all micro-batches but the last have a multiple of "
        "16 samples, of FP32 32\n"
        "1.weight  ordinary: no operator of ours forms its gradient\n"
        "0 exact, 1 chain, 1 ordinary"
    )


def test_report_of_a_tied_chain_is_ordinary():
    model = nn.Sequential(Chain(), Chain())
    model[1].weight = model[0].weight
    (weight,) = block(model).report().parameters
    assert weight.reason == "its gradient is a chain over rows, and several modules use it"


def test_same_memory_serves_the_chains_of_every_block():
    model = Chain()
    sums, addresses = block(model), []
    for _ in range(2):
        with sums:
            chain_backward(model, STEPS)
            addresses.append([t.data_ptr() for t in model.weight_chain])
    assert addresses[0] == addresses[1]
    assert "weight_chain" not in vars(copy.deepcopy(model))


def chained_arguments():
    """A backward of 32 rows that goes on from a chain."""
    x, dy = (t[:32] for t in chain_batch())
    weight, initial = Chain().weight.detach(), torch.linspace(-1, 1, 5)
    return [dy, x, weight, x.abs().amax(1), initial, 1.0, True, True, "golden"]


def test_chained_backward_is_derived_from_the_declaration_and_passes_opcheck():
    op = torch.ops.rlk.tiny_chain_layouts_backward_chained.default
    assert str(op._schema) == (
        "rlk::tiny_chain_layouts_backward_chained(Tensor dy, Tensor x, Tensor weight, Tensor peak,"
        " Tensor initial, float factor, bool need_x, bool need_weight, str backend)"
        " -> (Tensor dx, Tensor dweight)"
    )
    torch.library.opcheck(op, chained_arguments())


def test_chained_backward_second_differentiation_is_refused():
    arguments = chained_arguments()
    arguments[0].requires_grad_()
    _, chain = torch.ops.rlk.tiny_chain_layouts_backward_chained(*arguments)
    with pytest.raises(GradientError, match="the derivative must be of first order"):
        chain.sum().backward()


WRONG = {
    "weight_chain must be float32, got float64": lambda c, n: (c.double(), n),
    "weight_chain must be [5], got [4]": lambda c, n: (c[:4], n),
    "weight_calls must be [3], got [2]": lambda c, n: (c, n[:2]),
    "weight_calls must be a tensor beside the other carrier of weight, got None": (
        lambda c, n: (c, None)
    ),
    "carriers must be at most 2, got 3": lambda c, n: (c, n, n),
}


@pytest.mark.parametrize("message", WRONG)
def test_carriers_of_a_chain_that_do_not_fit_are_refused(message):
    x, _ = chain_batch()
    carriers = WRONG[message](torch.zeros(5), torch.zeros(3, dtype=torch.float64))
    with pytest.raises(RlkError) as caught:
        chained((x, Chain().weight), SCALARS, None, carriers)
    assert str(caught.value) == f"tiny_chain_layouts: {message}"
