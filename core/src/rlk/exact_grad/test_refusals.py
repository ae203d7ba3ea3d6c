# SPDX-License-Identifier: Apache-2.0
"""What a block refuses, and planted faults that its gradients show."""

import pytest
import torch

from rlk.compare import same_bits
from rlk.errors import ArgumentError, GradientError
from rlk.exact_grad import ExactGradAccumulator, state_of
from rlk.exact_grad.carrier import SumCarrier
from rlk.reduce import exact_sum
from rlk.test_support.exact_layouts import (
    EIGHT,
    WHOLE,
    Model,
    accumulated,
    assert_same_gradients,
    backward,
    batch,
    gradients,
)


def test_nested_and_second_blocks_of_one_module_are_refused():
    model = Model()
    message = "the module must be in one block at a time, got first.weight in a block already"
    with ExactGradAccumulator(model) as sums:
        for other in (sums, ExactGradAccumulator(model), ExactGradAccumulator(model.first)):
            with pytest.raises(GradientError, match=message.replace("first.", r"(first\.)?")):
                with other:
                    pass
        backward(model, EIGHT)
    assert_same_gradients(gradients(model), accumulated(WHOLE))


def test_backward_after_the_block_is_refused_instead_of_lost():
    model, (x, dy) = Model(), batch()
    with ExactGradAccumulator(model):
        y = model(x)
    with pytest.raises(GradientError) as caught:
        y.backward(dy)
    assert str(caught.value) == (
        "ExactGradAccumulator: backward must run inside the block of its forward, got one after it"
    )


def test_backward_in_a_block_without_the_parameter_is_refused():
    model, (x, dy) = Model(), batch()
    sums = ExactGradAccumulator(model)
    with sums:
        y = model(x)
    model.first.requires_grad_(False)
    with sums, pytest.raises(GradientError, match="inside the block of its forward, got one after"):
        y.backward(dy)


def test_backward_that_reaches_a_parameter_frozen_in_the_block_is_refused():
    model = Model()
    with ExactGradAccumulator(model):
        backward(model, WHOLE)
        model.first.requires_grad_(False)
        with pytest.raises(GradientError) as caught:
            backward(model, WHOLE)
        model.first.requires_grad_(True)
    assert str(caught.value) == (
        "ExactGradAccumulator: parameters must require gradients up to the end of the block, got "
        "first.weight frozen; end the block before, or leave it out by parameters="
    )


def test_parameter_put_in_the_place_of_another_in_the_block_is_refused_at_its_end():
    model = Model()
    before = model.first.weight
    with ExactGradAccumulator(model) as sums:
        backward(model, WHOLE)
        model.first.weight = torch.nn.Parameter(before.detach().clone())
        with pytest.raises(GradientError) as caught:
            sums.finalize()
        assert not before.grad.any()
        model.first.weight = before
    assert str(caught.value) == (
        "ExactGradAccumulator: modules must keep their parameters up to the end of the block, got "
        "another one in the place of first.weight; end the block before"
    )
    assert_same_gradients(gradients(model), accumulated(WHOLE))


@pytest.mark.parametrize("group", [-100, "world", [0, 1]], ids=repr)
def test_process_group_that_is_none_of_this_rank_is_refused(group):
    # -100 is what new_group returns to a rank outside.
    with pytest.raises(ArgumentError) as caught:
        ExactGradAccumulator(Model(), group)
    assert str(caught.value) == (
        "ExactGradAccumulator: process_group must be a torch.distributed.ProcessGroup of this rank,"
        f" got {group!r}"
    )


def test_block_that_cannot_be_entered_leaves_modules_as_they_were(monkeypatch):
    model, whole = Model(), SumCarrier.clear

    def second_has_no_memory(carrier):
        if model.first.weight_sum is not None or cleared:
            raise MemoryError
        cleared.append(carrier)
        whole(carrier)

    cleared = []
    monkeypatch.setattr(SumCarrier, "clear", second_has_no_memory)
    with pytest.raises(MemoryError), ExactGradAccumulator(model):
        pass
    assert model.first.weight_sum is None
    monkeypatch.undo()
    with ExactGradAccumulator(model):
        backward(model, WHOLE)
    assert_same_gradients(gradients(model), accumulated(WHOLE))


CLOSED = {
    "finalize": lambda sums: sums.finalize(),
    "state_dict": lambda sums: sums.state_dict(),
    "load_state_dict": lambda sums: sums.load_state_dict({}),
}


@pytest.mark.parametrize("name", CLOSED)
def test_call_outside_an_open_block_is_refused(name):
    sums = ExactGradAccumulator(Model())
    message = f"ExactGradAccumulator.{name}: the block must be open, got none or one that is"
    with pytest.raises(GradientError, match=message):
        CLOSED[name](sums)
    with sums:
        sums.finalize()
        with pytest.raises(GradientError, match=message):
            CLOSED[name](sums)


def test_divisor_that_is_no_count_is_refused_and_the_block_goes_on():
    model = Model()
    with ExactGradAccumulator(model) as sums:
        backward(model, EIGHT)
        with pytest.raises(ArgumentError, match=r"finalize: divide_by must be an int.* got 0.5"):
            sums.finalize(0.5)
    assert_same_gradients(gradients(model), accumulated(WHOLE))


STATE = torch.zeros(13, 5, dtype=torch.int64)
BAD_STATES = {
    "states must be tensors by name, got NoneType": None,
    "states must be tensors by name, got int": {"first.weight": 1, "second.weight": STATE},
    "states must name the exact parameters, got first.weight on one side alone": {},
    "first.weight must be int64 [13, 5], got float64 [13, 5]": {
        "first.weight": STATE.double(), "second.weight": STATE
    },
    "second.weight must be int64 [13, 5], got int64 [13, 4]": {
        "first.weight": STATE, "second.weight": STATE[:, :4]
    },
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_STATES)
def test_states_of_another_model_are_refused(message):
    with ExactGradAccumulator(Model()) as sums:
        with pytest.raises(ArgumentError) as caught:
            sums.load_state_dict(BAD_STATES[message])
        assert str(caught.value) == f"ExactGradAccumulator.load_state_dict: {message}"


def test_module_that_is_none_is_refused():
    with pytest.raises(ArgumentError) as caught:
        ExactGradAccumulator([Model().factor])
    assert str(caught.value) == (
        "ExactGradAccumulator: module must be a torch.nn.Module, got list; hand over the module "
        "that holds the parameters, and a list of them as parameters="
    )


@pytest.mark.parametrize(
    ("other", "got"), [(torch.zeros(2, 3), "one of shape [2, 3]"), ("weight", "a str")]
)
def test_parameters_of_another_module_are_refused(other, got):
    model = Model()
    with pytest.raises(ArgumentError) as caught:
        ExactGradAccumulator(model, parameters=[model.factor, other])
    assert str(caught.value) == (
        f"ExactGradAccumulator: parameters must be those of module, got {got} that is none"
    )


def rounded_to_float32(carrier):
    """The planted fault: a sum that is kept in FP32 between calls."""
    rows = exact_sum.round(state_of(carrier), torch.float32)[None]
    return exact_sum.add_rows(exact_sum.new(rows.shape[1]), rows).view(carrier.shape)


def test_planted_float32_accumulation_is_found():
    model, expected = Model(), accumulated(WHOLE)
    with ExactGradAccumulator(model):
        for piece in EIGHT:
            backward(model, [piece])
            for carrier in (model.first.weight_sum, model.second.weight_sum):
                carrier.grad.copy_(rounded_to_float32(carrier))
    assert differing(model, expected) == {"first.weight", "second.weight"}


def differing(model, expected):
    found = gradients(model)
    return {name for name in expected if not same_bits(found[name], expected[name])}


def test_planted_double_count_is_found():
    model, expected = Model(), accumulated(WHOLE)
    with ExactGradAccumulator(model):
        backward(model, [*EIGHT, EIGHT[1]])
    assert differing(model, expected) == {"first.weight", "second.weight"}
