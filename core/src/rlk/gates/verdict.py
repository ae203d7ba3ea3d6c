# SPDX-License-Identifier: Apache-2.0
"""From a comparison to a record: one place that decides passed or failed."""

from dataclasses import dataclass
from typing import Any

import torch

from rlk import compare
from rlk.arguments import dtype_name
from rlk.gates.candidate import Candidate, Run
from rlk.gates.case import Case
from rlk.gates.record import Mismatch, Provenance, Record

WEIGHTS = "synthetic"


@dataclass(frozen=True)
class Verdict:
    """Makes the records of one case."""

    case: Case
    candidate: Candidate

    def bits(
        self,
        tensor: str,
        actual: torch.Tensor,
        expected: torch.Tensor,
        *,
        config: str,
        pair: str | None,
        runs: tuple[Run, ...],
        faults: tuple[str, ...] = (),
        nan_alone: bool = False,
    ) -> Record:
        """Whether two tensors agree in shape, dtype and every bit.

        `nan_alone` allows a comparison in which nothing is finite: otherwise it judges nothing.
        """
        faults = (*self.faults(runs, tensor), *faults)
        comparable = actual.shape == expected.shape and actual.dtype == expected.dtype
        if not comparable:
            faults += (
                f"{tensor} is {dtype_name(actual.dtype)} {list(actual.shape)}, "
                f"expected {dtype_name(expected.dtype)} {list(expected.shape)}",
            )
        mismatch = compare.first_mismatch(actual, expected) if comparable else None
        if mismatch is not None:
            faults += (str(mismatch),)
        if actual.numel() == 0:
            faults += ("nothing was compared",)
        elif not nan_alone and not bool(expected.isfinite().any()):
            faults += ("nothing finite was compared",)
        largest, mean = _errors(actual, expected, mismatch) if comparable else (None, None)
        return self.record(
            tensor,
            faults,
            config=config,
            config_pair=pair,
            shape=list(actual.shape),
            dtype=dtype_name(actual.dtype),
            max_abs_error=largest,
            mean_abs_error=mean,
            ulp_histogram=mismatch.ulp_histogram if mismatch else {},
            first_mismatch=_first(mismatch),
        )

    def faults(self, runs: tuple[Run, ...], tensor: str) -> tuple[str, ...]:
        """What was wrong with the runs themselves (other code, no launch) or with the tensor."""
        found = []
        for run in runs:
            found += [fault for name, fault in run.faults if name == tensor]
            ran = sorted({launch.backend for launch in run.launches})
            directions = {launch.direction for launch in run.launches}
            if ran != [self.case.backend]:
                found.append(f"requested {self.case.backend}, ran {', '.join(ran) or 'nothing'}")
            if not set(run.directions) <= directions:
                wanted = " and ".join(run.directions)
                found.append(f"launches cover {sorted(directions)}, not {wanted}")
        return tuple(dict.fromkeys(found))

    def record(self, tensor: str, faults: tuple[str, ...], **fields: Any) -> Record:
        """A judged record: passed if no fault was found."""
        values: dict[str, Any] = {
            "config_pair": None,
            "max_abs_error": None,
            "mean_abs_error": None,
            "ulp_histogram": {},
            "correctly_rounded": None,
            "atol": None,
            "rtol": None,
            "comparisons": 1,
            "first_mismatch": None,
            **fields,
        }
        return Record(
            operator=self.case.operator.name,
            bits_version=self.case.operator.bits_version,
            backend=self.case.backend,
            judgment=self.case.judgment,
            status="failed" if faults else "passed",
            reason="; ".join(faults) or None,
            tensor=tensor,
            repro=self.case.repro,
            provenance=self.provenance(),
            **values,
        )

    def provenance(self) -> Provenance:
        """Requested backend, and what the launches of this case said they were."""
        launches = self.candidate.launches
        return Provenance(
            requested=self.case.backend,
            actual=sorted({launch.backend for launch in launches}),
            kernels=sorted({launch.kernel for launch in launches}),
            binaries=sorted({launch.binary for launch in launches}),
            device=str(self.candidate.device),
            weights=WEIGHTS,
        )


def not_run(case: Case, reason: str) -> Record:
    """A claim that this machine cannot judge: neither passed nor failed."""
    return Record(
        operator=case.operator.name,
        bits_version=case.operator.bits_version,
        backend=case.backend,
        judgment=case.judgment,
        status="not_run",
        reason=reason,
        tensor="",
        config="",
        config_pair=None,
        shape=[],
        dtype=case.dtype,
        max_abs_error=None,
        mean_abs_error=None,
        ulp_histogram={},
        correctly_rounded=None,
        atol=None,
        rtol=None,
        comparisons=0,
        first_mismatch=None,
        repro=case.repro,
        provenance=Provenance(
            requested=case.backend,
            actual=[],
            kernels=[],
            binaries=[],
            device=str(case.device),
            weights=WEIGHTS,
        ),
    )


def _errors(
    actual: torch.Tensor, expected: torch.Tensor, mismatch: compare.Mismatch | None
) -> tuple[float | None, float | None]:
    """The largest and the mean error of the elements that have one.

    Equal infinities and NaN differ by NaN: the bits say whether they agree.
    """
    if not actual.is_floating_point():
        return None, None
    if mismatch is None:
        # Equal bits need no arithmetic, which takes the longest where all is well.
        return (0.0, 0.0) if bool(expected.isfinite().any()) else (None, None)
    difference = (actual.detach().cpu().double() - expected.detach().cpu().double()).abs()
    known = difference[difference.isfinite()]
    return (float(known.max()), float(known.mean())) if known.numel() else (None, None)


def _first(mismatch: compare.Mismatch | None) -> Mismatch | None:
    if mismatch is None:
        return None
    return Mismatch(
        index=list(mismatch.index),
        actual=mismatch.actual,
        expected=mismatch.expected,
        count=mismatch.count,
    )
