# SPDX-License-Identifier: Apache-2.0
"""What a run gives a backend, and what it notices about results before any judgment."""

import pytest
import torch

from rlk.errors import RlkError
from rlk.execution import Execution
from rlk.gates.candidate import Candidate, fresh_memory_is_nan, placed
from rlk.gates.inputs import fixture
from rlk.gates.layout import LAYOUTS
from rlk.reduce import exact_sum

CPU = torch.device("cpu")


def run(scale, dtype="float32", **fields):
    operator = scale.operator(**fields)
    batch = fixture(operator, dtype, rows=5, sizes={"N": 8}, seed=1)
    return Candidate(Execution(operator), "golden", CPU).run_fixture(batch, states=True)


@pytest.mark.parametrize("layout", [*LAYOUTS, "expanded"])
def test_placed_any_layout_keeps_strides_offset_and_values(layout):
    values = torch.arange(24.0).view(4, 6)
    made = LAYOUTS.get(layout, lambda t: t[:1].expand_as(t))(values)
    copy = placed(made, CPU)
    assert torch.equal(copy, made)
    assert (copy.stride(), copy.storage_offset()) == (made.stride(), made.storage_offset())
    assert copy.untyped_storage().data_ptr() != made.untyped_storage().data_ptr()


def test_fresh_memory_unwritten_elements_are_nan_inside_the_block_alone():
    with fresh_memory_is_nan():
        made = (torch.empty(3), torch.ones(2).new_empty(3), torch.empty_like(torch.ones(3)))
        assert all(t.isnan().all() for t in made)
    assert not torch.are_deterministic_algorithms_enabled()


def test_run_right_operator_has_no_faults_and_own_inputs(scale):
    done = run(scale)
    assert done.faults == []
    assert set(done.tensors) == {"y", "dx", "dweight"}
    assert set(done.given) == {"x", "weight", "dy"}
    assert {launch.direction for launch in done.launches} == {"forward", "backward"}


def test_run_output_of_wrong_dtype_raises_by_name(scale):
    def forward(x, weight):
        return (scale.forward(x, weight)[0].float(),)

    with pytest.raises(RlkError, match="scale: y must be bfloat16, got float32"):
        run(scale, "bfloat16", forward=forward)


def test_run_gradient_that_is_not_its_state_is_a_fault_of_that_tensor(scale):
    def backward(dy, x, weight, *, needs):
        dx, state = scale.backward(dy, x, weight, needs=needs)
        return dx, state if "x" not in needs else exact_sum.merge(state, state)

    ((tensor, fault),) = run(scale, backward=backward).faults
    assert tensor == "dweight"
    assert fault.startswith("dweight from autograd is not the rounding of its state: 8 of 8")


def test_run_state_with_digits_not_carried_is_a_fault_of_that_tensor(scale):
    def backward(*tensors, needs):
        dx, state = scale.backward(*tensors, needs=needs)
        if state is not None:
            state[0] += 1 << 32
            state[1] -= 1
        return dx, state

    assert run(scale, backward=backward).faults == [
        ("dweight", "the state of dweight is not normalised")
    ]
