# SPDX-License-Identifier: Apache-2.0
"""Blocks of one process: the bits of one call, however it was cut."""

import copy
import io
import pickle
from fractions import Fraction

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rlk.compare import assert_same_bits, same_bits
from rlk.exact_grad import ExactGradAccumulator, new_carrier
from rlk.reduce import exact_sum
from rlk.test_support.exact_layouts import (
    EIGHT,
    SAMPLES,
    WHOLE,
    Model,
    Scale,
    accumulated,
    assert_same_gradients,
    backward,
    batch,
    gradients,
    layouts,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def single_weight(pieces=WHOLE):
    """A model of one call, whose own gradient of the whole batch is the expected one."""
    model = Scale()
    backward(model, pieces)
    return gradients(model)


def test_gradient_of_micro_batches_has_the_bits_of_one_ordinary_call():
    expected = single_weight()
    assert not same_bits(single_weight(EIGHT)["weight"], expected["weight"])
    for (pieces,) in layouts(1):
        assert_same_gradients(accumulated(pieces, Scale()), expected, pieces)
        backwards = list(reversed(pieces))
        assert_same_gradients(accumulated(backwards, Scale()), expected, backwards)


def test_gradient_of_a_module_used_twice_does_not_depend_on_micro_batches():
    expected = accumulated(WHOLE)
    ordinary = Model()
    backward(ordinary, EIGHT)
    assert not same_bits(gradients(ordinary)["second.weight"], expected["second.weight"])
    for (pieces,) in layouts(1):
        assert_same_gradients(accumulated(pieces), expected, pieces)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_of_recomputed_layers_has_the_same_bits(reentrant):
    model, (x, dy) = Model(), batch()
    with ExactGradAccumulator(model):
        for start, stop in EIGHT:
            rows = x[start:stop].clone().requires_grad_()
            checkpoint(model, rows, use_reentrant=reentrant).backward(dy[start:stop])
    assert_same_gradients(gradients(model), accumulated(WHOLE))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_gradient_of_a_compiled_model_has_the_same_bits_in_every_block(compiler):
    torch._dynamo.reset()
    model = Model()
    compiled = torch.compile(model, fullgraph=True, backend=compiler, dynamic=True)
    sums = ExactGradAccumulator(compiled)
    expected = accumulated(WHOLE)
    for _ in range(2):
        model.zero_grad()
        with sums:
            backward(compiled, EIGHT)
        assert_same_gradients(gradients(model), expected, compiler)
    y = compiled(batch()[0])
    model.zero_grad()
    y.backward(batch()[1])
    ordinary = Model()
    backward(ordinary, WHOLE)
    assert_same_gradients(gradients(model), gradients(ordinary), "after the blocks")


def test_compiled_model_in_new_blocks_is_not_compiled_again():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = Model()
    compiled = torch.compile(model, backend=counter)
    frames = []
    for _ in range(3):
        with ExactGradAccumulator(model):
            backward(compiled, WHOLE)
        frames.append(counter.frame_count)
    assert frames[0] == frames[2] > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("divisor", [1, 2, 3, 4096, 6_889])
def test_quotient_is_that_of_the_exact_sum_rounded_once(dtype, divisor):
    model, (x, dy) = Scale(dtype), batch()
    with ExactGradAccumulator(model) as sums:
        for start, stop in EIGHT:
            model(x[start:stop].to(dtype)).backward(dy[start:stop].to(dtype))
        states = sums.state_dict()["weight"]
        sums.finalize(divide_by=divisor)
    values = [sum(int(d) << 32 * k for k, d in enumerate(c[:10])) for c in states.T.tolist()]
    for value, found in zip(values, model.weight.grad.tolist(), strict=True):
        quotient = Fraction(value, divisor) * Fraction(2) ** -149
        below, above = (
            torch.nextafter(torch.tensor(found, dtype=dtype), torch.tensor(towards, dtype=dtype))
            for towards in (-torch.inf, torch.inf)
        )
        distance = abs(Fraction(found) - quotient)
        assert distance <= abs(Fraction(below.item()) - quotient)
        assert distance <= abs(Fraction(above.item()) - quotient)


def test_factor_in_the_loss_and_quotient_are_two_different_gradients():
    # loss * world / T on each of 3 ranks, then a mean over ranks, is not loss / T.
    (x, dy), tokens, world = batch(), SAMPLES * 3, 3
    in_loss, averaged = Scale(), Scale()
    in_loss(x).backward(dy * (1 / tokens))
    averaged(x).backward(dy * (world / tokens))
    averaged.weight.grad /= world
    quotient = accumulated(WHOLE, Scale(), divide_by=tokens)["weight"]
    assert not same_bits(in_loss.weight.grad, averaged.weight.grad)
    assert not same_bits(in_loss.weight.grad, quotient)


def test_main_grad_takes_float32_of_a_bfloat16_parameter():
    model, (x, dy) = Scale(torch.bfloat16), batch()
    kept = model.weight.main_grad = torch.full((5,), 7.0)
    sums = ExactGradAccumulator(model, main_grad=True)
    with sums:
        for start, stop in EIGHT:
            model(x[start:stop].bfloat16()).backward(dy[start:stop].bfloat16())
        state = sums.state_dict()["weight"]
    assert model.weight.grad is None
    assert model.weight.main_grad is kept
    assert_same_bits(kept, exact_sum.round(state, torch.float32), "main_grad")
    del model.weight.main_grad
    with sums:
        model(x.bfloat16()).backward(dy.bfloat16())
    assert model.weight.main_grad.dtype == torch.float32


def test_gradient_from_elsewhere_is_added_once_to_the_rounded_sum():
    model = Scale()
    model.weight.grad = torch.full((5,), 3.0)
    held = model.weight.grad
    with ExactGradAccumulator(model):
        backward(model, EIGHT)
        (model.weight * 2.0).sum().backward()
    assert model.weight.grad is held
    assert_same_bits(held, single_weight()["weight"] + 5.0, "gradient")


def test_negative_sum_that_rounds_to_zero_keeps_its_sign():
    model = Scale(torch.float16)
    with ExactGradAccumulator(model) as sums:
        model(torch.ones(1, 5, dtype=torch.float16)).sum().backward()
        state = torch.zeros(13, 5, dtype=torch.int64)
        state[0] = -1  # -2^-149
        sums.load_state_dict({"weight": state})
    assert_same_bits(model.weight.grad, torch.full((5,), -0.0).half(), "gradient")


def test_block_without_a_call_gives_zeros():
    model = Scale()
    with ExactGradAccumulator(model):
        pass
    assert_same_bits(model.weight.grad, torch.zeros(5), "gradient")


def test_special_values_reach_the_gradient_as_in_an_ordinary_sum():
    model = Scale()
    with ExactGradAccumulator(model):
        for value in (1.0, torch.inf, -torch.inf, torch.nan):
            dy = torch.zeros(1, 5)
            dy[0, 0] = value
            dy[0, 1] = value if value == torch.inf else 1.0
            model(torch.ones(1, 5)).backward(dy)
    assert torch.isnan(model.weight.grad[0])
    assert model.weight.grad[1] == torch.inf
    assert model.weight.grad[2:].tolist() == [0.0] * 3


@pytest.mark.parametrize("stop", [0, 1, 4, len(EIGHT)])
def test_accumulation_that_was_killed_and_restarted_has_the_same_bytes(stop):
    buffer = io.BytesIO()
    killed = Model()
    with ExactGradAccumulator(killed) as sums:
        backward(killed, EIGHT[:stop])
        torch.save(sums.state_dict(), buffer)
        backward(killed, EIGHT[stop:])
    buffer.seek(0)
    model = Model()
    with ExactGradAccumulator(model) as sums:
        # What came before is replaced, not added to.
        backward(model, EIGHT[:1])
        sums.load_state_dict(torch.load(buffer))
        backward(model, EIGHT[stop:])
    assert_same_gradients(gradients(model), accumulated(WHOLE))


def test_state_dict_of_other_orders_has_the_same_bytes():
    states = []
    for pieces in (WHOLE, EIGHT, EIGHT[::-1]):
        model = Model()
        with ExactGradAccumulator(model) as sums:
            backward(model, pieces)
            states.append(sums.state_dict())
    for other in states[1:]:
        assert_same_gradients(other, states[0])


def test_exception_leaves_gradients_and_modules_as_ordinary_calls_would():
    def interrupted():
        with ExactGradAccumulator(model):
            backward(model, EIGHT)
            raise KeyboardInterrupt

    model = Model()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    for gradient in gradients(model).values():
        assert_same_bits(gradient, torch.zeros(5), "gradient")
    model.zero_grad()
    backward(model, EIGHT)
    ordinary = Model()
    backward(ordinary, EIGHT)
    assert_same_gradients(gradients(model), gradients(ordinary))


def test_model_after_a_block_holds_what_it_held_before():
    model = Model()
    before = [dict(vars(m)) for m in model.modules()]
    accumulated(EIGHT, model)
    assert [list(vars(m)) for m in model.modules()] == [list(b) for b in before]
    for duplicate in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        twin = duplicate(model)
        twin.zero_grad()
        assert_same_gradients(accumulated(EIGHT, twin), accumulated(WHOLE))


def test_carriers_are_no_part_of_parameters_buffers_or_state_dict():
    model = Model()
    names = [list(model.state_dict()), [n for n, _ in model.named_parameters()]]
    with ExactGradAccumulator(model):
        assert model.first.weight_sum is not None
        assert names == [list(model.state_dict()), [n for n, _ in model.named_parameters()]]
        assert list(model.buffers()) == []


def test_clipping_and_several_optimisers_see_the_gradients_of_one_call():
    def step(pieces):
        model = Model()
        optimisers = [torch.optim.SGD(model.first.parameters(), 0.1),
                      torch.optim.AdamW(model.second.parameters())]  # fmt: skip
        sums = ExactGradAccumulator(model)
        for _ in range(2):
            with sums:
                backward(model, pieces)
            exact = [model.first.weight, model.second.weight]
            torch.nn.utils.clip_grad_norm_(exact, 1.0)
            for optimiser in optimisers:
                optimiser.step()
                optimiser.zero_grad()
        return [model.first.weight.detach(), model.second.weight.detach()]

    for found, expected in zip(step(EIGHT), step(WHOLE), strict=True):
        assert_same_bits(found, expected, "weight")
    assert not same_bits(step(WHOLE)[0], Model().first.weight)


def test_same_memory_serves_every_block_of_one_accumulator():
    model = Model()
    sums, addresses = ExactGradAccumulator(model), []
    for _ in range(2):
        with sums:
            backward(model, EIGHT)
            addresses.append((model.first.weight_sum.data_ptr(),
                              model.first.weight_sum.grad.data_ptr()))  # fmt: skip
    assert addresses[0] == addresses[1]


def test_tied_weight_takes_the_sums_of_both_modules():
    model = Model()
    model.first.weight = model.second.weight
    found = accumulated(EIGHT, model)
    assert list(found) == ["first.weight"]
    twin = Model()
    twin.first.weight = twin.second.weight
    assert_same_gradients(found, accumulated(WHOLE, twin))


def test_carrier_of_a_million_calls_adds_without_rounding():
    carrier = new_carrier(torch.ones(2))
    top = float(2**32 - 1)
    carrier.grad = torch.full((13, 2), top, dtype=torch.float64) * (2**20 - 1)
    carrier.grad += top
    assert (carrier.grad == 2**20 * (2**32 - 1)).all()
    assert carrier.grad[0].long().tolist() == [2**20 * (2**32 - 1)] * 2
