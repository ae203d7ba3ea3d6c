# SPDX-License-Identifier: Apache-2.0
"""Gates: is a claim true, on this machine, now? Every judgment leaves records."""

from collections.abc import Callable
from pathlib import Path

from rlk import dispatch
from rlk.errors import BackendError, PlatformError
from rlk.execution import Execution
from rlk.gates import golden_hashes
from rlk.gates.accuracy import forward_accuracy, gradient_accuracy
from rlk.gates.agreement import against_hashes, backend_equal
from rlk.gates.candidate import Candidate
from rlk.gates.case import DEFAULT_SEED, JUDGMENTS, Case, cases
from rlk.gates.invariance import forward_invariance, gradient_invariance, order_free
from rlk.gates.layout import layout
from rlk.gates.mma_schedule import mma_schedule
from rlk.gates.record import Record, Report, summarise
from rlk.gates.repeatable import repeatable
from rlk.gates.rollout_equal import rollout_equal
from rlk.gates.special_values import special_values
from rlk.gates.verdict import Verdict, not_run

__all__ = [
    "DEFAULT_SEED",
    "JUDGMENTS",
    "Case",
    "Record",
    "Report",
    "cases",
    "golden_hashes",
    "judge",
    "summarise",
]

_JUDGES: dict[str, Callable[[Verdict], list[Record]]] = {
    "forward_accuracy": forward_accuracy,
    "gradient_accuracy": gradient_accuracy,
    "forward_invariance": forward_invariance,
    "gradient_invariance": gradient_invariance,
    "repeatable": repeatable,
    "order_free": order_free,
    "backend_equal": backend_equal,
    "gpu_to_gpu": against_hashes,
    "layout": layout,
    "special_values": special_values,
    "mma_schedule": mma_schedule,
    "rollout_equal": rollout_equal,
}


def judge(case: Case, dump: Path | None = None) -> list[Record]:
    """Judge one case.

    Args:
        case: what to judge.
        dump: a folder that receives the inputs and results of failing runs.
    Returns:
        Records, at least one. A claim this machine cannot judge gives one `not_run` record with
        the reason; a case that raises or judges nothing gives a failed one.
    """
    candidate = Candidate(Execution(case.operator), case.backend, case.device)
    verdict = Verdict(case, candidate)
    try:
        reason = _cannot_run(case)
        if reason is not None:
            return [not_run(case, reason)]
        records = _JUDGES[case.judgment](verdict)
    except Exception as error:  # noqa: BLE001 - whatever a backend raises fails its own case
        fault = f"{type(error).__name__}: {error}"
        records = [verdict.record("", (fault,), config="", shape=[], dtype=case.dtype)]
    if not records:
        fault = "nothing was judged"
        records = [verdict.record("", (fault,), config="", shape=[], dtype=case.dtype)]
    if dump is not None and any(r.status == "failed" for r in records):
        candidate.dump(dump / case.identity.replace("/", "_"))
    return records


def _cannot_run(case: Case) -> str | None:
    """Why this machine cannot judge the case, or None."""
    if case.operator.backend(case.backend) is None:
        declared = ", ".join(repr(b.name) for b in case.operator.backends)
        return f"it has no backend {case.backend!r}, only {declared}"
    if case.judgment in ("gpu_to_gpu", "mma_schedule") and case.device.type != "cuda":
        return "it needs an NVIDIA GPU of compute capability 8.0 or newer, and this run has none"
    try:
        dispatch.choose(case.operator, case.device, case.backend)
    except (PlatformError, BackendError) as error:
        return str(error)
    except ImportError as error:
        return f"{case.backend} cannot be loaded: {error}"
    return None
