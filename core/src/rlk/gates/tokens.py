# SPDX-License-Identifier: Apache-2.0
"""The tokens of one sample as rows: what gates judge where exact sums run within a row.

The view of x [..., S, N] has rows [N], and what the sample has once, such as scale [N], stands
beside them as parameters do. So everything that arranges rows into calls arranges tokens.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import torch

from rlk.gates.candidate import Candidate, Run
from rlk.gates.record import Record
from rlk.gates.verdict import Verdict
from rlk.operator import Operator, Tensor, Workload


def tokens_as_rows(verdict: Verdict) -> Verdict | None:
    """The same verdict on the tokens of one sample; None if the operator sums no tokens."""
    operator = verdict.case.operator
    if operator.token_axis is None:
        return None
    view = view_of_tokens(operator, operator.token_axis)
    case = replace(verdict.case, operator=view)
    return Verdict(case, TokenCandidate(verdict.candidate, view))


def of_tokens(records: list[Record]) -> list[Record]:
    """Records of such a verdict, named apart from those of samples."""
    return [msgspec.structs.replace(r, config=f"tokens_{r.config}") for r in records]


def view_of_tokens(operator: Operator, axis: str) -> Operator:
    """The declaration as it reads for one sample, T being its number of tokens."""

    def viewed(tensor: Tensor) -> Tensor:
        if axis in tensor.shape:
            return replace(tensor, shape=("...", *tensor.shape[2:]))
        if tensor.has_rows:
            if tensor.gradient is None:
                return replace(tensor, shape=tensor.shape[1:])
            return replace(tensor, shape=tensor.shape[1:], gradient="parameter")
        return tensor

    def resized(workload: Workload) -> Workload:
        others = {s: size for s, size in workload.sizes.items() if s not in ("T", axis)}
        return replace(workload, sizes={"T": workload.sizes[axis], **others})

    return replace(
        operator,
        inputs=tuple(map(viewed, operator.inputs)),
        outputs=tuple(map(viewed, operator.outputs)),
        saved=tuple(map(viewed, operator.saved)),
        reductions=tuple(
            replace(r, axis="T") if r.axis == axis else r for r in operator.reductions
        ),
        workloads=tuple(map(resized, operator.workloads)),
        gate_sizes={s: size for s, size in operator.gate_sizes.items() if s != axis},
        odd_sizes=(),
    )


class TokenCandidate(Candidate):
    """Runs calls of the view as calls of the operator on one sample."""

    def __init__(self, samples: Candidate, view: Operator) -> None:
        super().__init__(samples.execution, samples.backend, samples.device)
        self._samples = samples
        self.operator = view
        self.launches = samples.launches

    def run(
        self,
        inputs: Mapping[str, torch.Tensor],
        upstream: Mapping[str, torch.Tensor],
        scalars: Mapping[str, Any],
        *,
        states: bool = False,
        gradients: bool = True,
    ) -> Run:
        """As of any candidate; what the sample has once comes back without an axis of rows."""
        real = self._samples.operator
        declared = {t.name: t for t in real.inputs + real.outputs + real.saved}
        given = {n: _in_sample(real, declared[n], t) for n, t in inputs.items()}
        output = {n: _in_sample(real, declared[n], t) for n, t in upstream.items()}
        run = self._samples.run(given, output, scalars, states=states, gradients=gradients)
        first = next(t for t in real.inputs if real.token_axis in t.shape)
        tokens = inputs[first.name]
        leading = tokens.shape[: tokens.dim() - len(first.shape) + 2]
        declared |= {f"d{t.name}": t for t in real.inputs}
        run.tensors = {n: _as_tokens(real, declared[n], t, leading) for n, t in run.tensors.items()}
        return run


def _in_sample(operator: Operator, declared: Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """[1, S, ...] of a tensor of tokens with any leading axes, [1, ...] of another with rows."""
    if operator.token_axis in declared.shape:
        own = tensor.shape[tensor.dim() - len(declared.shape) + 2 :]
        return tensor.reshape(1, -1, *own)
    return tensor.unsqueeze(0) if declared.has_rows else tensor


def _as_tokens(
    operator: Operator, declared: Tensor, tensor: torch.Tensor, leading: torch.Size
) -> torch.Tensor:
    """The way back."""
    if operator.token_axis in declared.shape:
        return tensor.reshape(*leading, *tensor.shape[2:])
    return tensor.squeeze(0) if declared.has_rows else tensor
