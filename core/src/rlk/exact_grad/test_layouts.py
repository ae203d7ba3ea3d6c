# SPDX-License-Identifier: Apache-2.0
"""One to four ranks, even and uneven, wrapped and not: the bytes of one call on one process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlk.torch_suite.ranks import Ranks

pytestmark = pytest.mark.xdist_group("exact_layouts")


class Task:
    """A function of exact_rank_tasks, whose imports only ranks pay for."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any) -> None:
        from rlk.test_support import exact_rank_tasks

        getattr(exact_rank_tasks, self.name)(*arguments)


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    """Four processes, of which a task may leave some out."""
    ranks = Ranks("cpu", 4)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("divide_by", [1, 7])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_layout_of_ranks_and_micro_batches_changes_no_byte(four, size, divide_by):
    four.run(Task("compare_layouts"), size, divide_by)


@pytest.mark.parametrize("fault", ["missing", "twice"])
def test_planted_fault_of_one_rank_is_found_in_every_exact_gradient(four, fault):
    four.run(Task("plant"), fault)


def test_accumulation_restarted_on_other_ranks_has_the_same_bytes(four):
    four.run(Task("restart"))


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_ddp_steps_are_those_of_one_process(four, size, as_view):
    four.run(Task("wrap_in_ddp"), size, as_view)


@pytest.mark.parametrize("whole_model", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_fully_sharded_gradients_are_those_of_one_process(four, size, whole_model):
    four.run(Task("shard"), size, whole_model)


@pytest.mark.parametrize("wrap", ["none", "ddp", "fsdp2"])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_chains_of_ranks_are_added_in_their_order(four, size, wrap):
    four.run(Task("add_chains"), size, wrap)


def test_values_of_ranks_are_added_in_their_order(four):
    four.run(Task("sum_values"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_values_of_two_gpus_are_added_in_their_order():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    ranks = Ranks("cuda")
    try:
        ranks.run(Task("sum_values"))
    finally:
        ranks.close()


def test_accumulator_without_a_group_uses_all_ranks(four):
    four.run(Task("use_default_group"))


def test_carrier_beside_a_dtensor_is_refused(four):
    four.run(Task("refuse_dtensors"))
