# SPDX-License-Identifier: Apache-2.0
"""What several judging processes say when one of them ends early."""

import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from rlk.errors import RlkError
from rlk.gates import cases, workers

PATIENCE = 120  # Seconds.


class EndsAtOnce(ProcessPoolExecutor):
    """Its processes end at the first case, and it hands out no other before they have ended."""

    def submit(self, *case):
        handed_out = super().submit(os._exit, 7)
        handed_out.exception(timeout=PATIENCE)
        return handed_out


class EndsUnnoticed(ProcessPoolExecutor):
    """Says that it is shut down, as one may that is just finding out that it is broken."""

    def submit(self, *case):
        self.shutdown()
        return super().submit(*case)


@pytest.mark.parametrize("pool", [EndsAtOnce, EndsUnnoticed])
def test_a_process_that_ends_while_cases_are_handed_out_is_named(scale, monkeypatch, pool):
    monkeypatch.setattr(workers, "ProcessPoolExecutor", pool)
    planned = cases([scale.operator()])
    assert len(planned) > 1
    with pytest.raises(RlkError, match="a process must live until its case ends") as refused:
        list(workers.judged(planned, None, jobs=2))
    assert planned[0].identity in str(refused.value)
