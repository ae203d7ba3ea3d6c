# SPDX-License-Identifier: Apache-2.0
"""Who gets no time: ours whose gate is red, and libraries that compute another function."""

from rlk.bench.variants import OURS, rivals
from rlk.gates import JUDGMENTS, cases, judge
from rlk.operator import Operator
from rlk.records.document import Verdict

# Fresh processes of `repeatable` take longer than all the rest; `rlk gate` judges them.
JUDGED = tuple(judgment for judgment in JUDGMENTS if judgment != "repeatable")
# Rows on which the function of a library is probed.
PROBED_ROWS = 8


def refusals(operator: Operator, dtype: str) -> dict[str, tuple[Verdict, str]]:
    """Names of variants, with the verdict and the reason."""
    found: dict[str, tuple[Verdict, str]] = {}
    for backend in OURS:
        if operator.backend(backend) is not None:
            red = _red(operator, backend, dtype)
            if red is not None:
                found[backend] = ("failed", f"its gate is red: {red}")
    return found | _others(operator, dtype)


def _red(operator: Operator, backend: str, dtype: str) -> str | None:
    """The first judgment that failed, or None."""
    for case in cases([operator], backend=backend):
        if case.dtype == dtype and case.judgment in JUDGED:
            for record in judge(case):
                if record.status == "failed":
                    return f"{record.judgment} of {record.tensor or operator.name}, {record.reason}"
    return None


def _others(operator: Operator, dtype: str) -> dict[str, tuple[Verdict, str]]:
    # Here, as values.py asks variants.py who there is.
    from rlk.survey.values import places, survey

    place = places(operator, dtype, PROBED_ROWS, seed=0)[0]
    found: dict[str, tuple[Verdict, str]] = {}
    for peer in rivals(operator):
        if peer.missing() is None:
            row = survey(place, peer.name)
            if row.verdict == "other function":
                found[peer.name] = (row.verdict, row.reason or "")
    return found
