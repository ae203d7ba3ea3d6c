# SPDX-License-Identifier: Apache-2.0
"""A task that fails or ends on one rank fails the test, and leaves the next one alone."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from rlk.torch_suite import ranks
from rlk.torch_suite.ranks import RankFailure, Ranks


@pytest.fixture(scope="module")
def pair():
    pool = Ranks("cpu")
    yield pool
    pool.close()


def add_ranks(device, expected):
    """An all-reduce of 1 and 2."""
    total = torch.tensor(dist.get_rank() + 1, device=device)
    dist.all_reduce(total)
    assert int(total) == expected


def fail_on_one(device, how):
    """Rank 0 fails while rank 1 waits for it."""
    if dist.get_rank() == 0:
        how()
    dist.barrier()


def raise_error():
    raise ValueError("a reason")


def end_process():
    os._exit(3)


def test_task_that_passes_on_both_ranks_returns(pair):
    pair.run(add_ranks, 3)
    with pytest.raises(RankFailure, match=r"(?s)rank 0: .*AssertionError.*rank 1: .*AssertionErr"):
        pair.run(add_ranks, 4)


@pytest.mark.parametrize(
    ("how", "reason"), [(raise_error, "ValueError: a reason"), (end_process, "the process ended")]
)
def test_task_that_fails_on_one_rank_ends_soon_and_the_next_runs(pair, how, reason):
    pair.run(add_ranks, 3)
    start = time.monotonic()
    with pytest.raises(RankFailure, match=f"(?s)rank 0: .*{reason}"):
        pair.run(fail_on_one, how)
    assert time.monotonic() - start < ranks.TIMEOUT / 2
    pair.run(add_ranks, 3)


def test_task_that_hangs_is_given_up(pair, monkeypatch):
    pair.run(add_ranks, 3)
    monkeypatch.setattr(ranks, "TIMEOUT", 1.0)
    with pytest.raises(RankFailure, match="rank 0: no answer\nrank 1: no answer"):
        pair.run(hang)


def hang(device):
    """Longer than any test may take."""
    time.sleep(3600)
