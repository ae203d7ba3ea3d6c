# SPDX-License-Identifier: Apache-2.0
"""Who gets no time: ours whose gate is red, and libraries that compute another function."""

import multiprocessing
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor

from rlk import registry
from rlk.bench.variants import OURS, timed_peers
from rlk.gates import JUDGMENTS, cases, judge
from rlk.gates.workers import start
from rlk.operator import Operator
from rlk.records.document import Verdict

# Fresh processes of `repeatable` take longer than all the rest; `rlk gate` judges them.
JUDGED = tuple(judgment for judgment in JUDGMENTS if judgment != "repeatable")
# Rows on which the function of a library is probed.
PROBED_ROWS = 8
# Who is asked one by one: each of our backends, and all libraries.
_OTHERS = "others"
_PARTS = (*OURS, _OTHERS)

Refusals = dict[str, tuple[Verdict, str]]


def side_by_side(wanted: Sequence[tuple[Operator, str]], jobs: int) -> list[Refusals]:
    """`refusals` of each, in processes that have ended when this returns and something is timed.

    Args:
        wanted: installed operators, and dtypes.
        jobs: how many processes.
    """
    # Spawned: a process forked after CUDA has started could not use it.
    context = multiprocessing.get_context("spawn")
    # A backend's gates take as long as all that others are asked: each is a task of its own.
    with ProcessPoolExecutor(min(jobs, len(_PARTS) * len(wanted)), context, start) as pool:
        waiting = [
            [pool.submit(_of_installed, operator.name, dtype, part) for part in _PARTS]
            for operator, dtype in wanted
        ]
        return [_together(future.result() for future in parts) for parts in waiting]


def _of_installed(name: str, dtype: str, part: str) -> Refusals:
    return _part(registry.find(name), dtype, part)


def refusals(operator: Operator, dtype: str) -> Refusals:
    """Names of variants, with the verdict and the reason."""
    return _together(_part(operator, dtype, part) for part in _PARTS)


def _together(parts: Iterable[Refusals]) -> Refusals:
    return {name: verdict for part in parts for name, verdict in part.items()}


def _part(operator: Operator, dtype: str, part: str) -> Refusals:
    if part == _OTHERS:
        return _others(operator, dtype)
    red = None if operator.backend(part) is None else _red(operator, part, dtype)
    return {} if red is None else {part: ("failed", f"its gate is red: {red}")}


def _red(operator: Operator, backend: str, dtype: str) -> str | None:
    """The first judgment that failed, or None."""
    for case in cases([operator], backend=backend):
        if case.dtype == dtype and case.judgment in JUDGED:
            for record in judge(case):
                if record.status == "failed":
                    return f"{record.judgment} of {record.tensor or operator.name}, {record.reason}"
    return None


def _others(operator: Operator, dtype: str) -> Refusals:
    # Here, as values.py asks variants.py who there is.
    from rlk.survey.values import places, survey

    place = places(operator, dtype, PROBED_ROWS, seed=0)[0]
    found: Refusals = {}
    for peer in timed_peers(operator):
        if peer.missing() is None:
            row = survey(place, peer.name)
            if row.verdict == "other function":
                found[peer.name] = (row.verdict, row.reason or "")
    return found
