# SPDX-License-Identifier: Apache-2.0
"""One run of an operator on one backend, as a user would run it, and what code it ran."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlk.compare import first_mismatch
from rlk.execution import Execution
from rlk.gates.inputs import Fixture
from rlk.launch import Launch, trace
from rlk.reduce import exact_sum


@dataclass
class Run:
    """Results by name (y, rstd, dx, dweight ...), exact states, and the launches behind them."""

    tensors: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]
    launches: list[Launch] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class Candidate:
    """An operator on one backend and device."""

    def __init__(self, execution: Execution, backend: str, device: torch.device) -> None:
        self.execution = execution
        self.operator = execution.operator
        self.backend = backend
        self.device = device
        self.launches: list[Launch] = []
        self._last: dict[str, torch.Tensor] = {}

    def run(
        self,
        inputs: Mapping[str, torch.Tensor],
        upstream: Mapping[str, torch.Tensor],
        scalars: Mapping[str, Any],
        *,
        states: bool = False,
    ) -> Run:
        """Forward and backward through autograd; `states` adds the exact parameter gradients.

        A parameter gradient from autograd must be the rounding of that state: anything else is a
        fault of the run.
        """
        leaves = [
            inputs[t.name].to(self.device).detach().requires_grad_(t.gradient is not None)
            for t in self.operator.inputs
        ]
        given = [upstream[t.name].to(self.device) for t in self.operator.outputs]
        with trace() as launches:
            results = self.call(leaves, scalars)
            outputs = results[: len(self.operator.outputs)]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            gradients = torch.autograd.grad(outputs, wanted, given)
            run = self._named(results, gradients)
            if states:
                run.states = self._states(leaves, results, given, scalars)
        run.launches = list(launches)
        self._last = {**inputs, **{f"d{n}": t for n, t in upstream.items()}, **run.tensors}
        self.launches += launches
        run.faults += self._wrong_dtypes(run, leaves) + self._wrong_rounding(run, leaves)
        return run

    def dump(self, folder: Path) -> None:
        """Write the last run's inputs, upstream gradients and results to a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self._last, folder / "last_run.pt")

    def run_fixture(self, fixture: Fixture, *, states: bool = False) -> Run:
        """`run` on a fixture."""
        return self.run(fixture.inputs, fixture.upstream, fixture.scalars, states=states)

    def sums(
        self,
        inputs: Mapping[str, torch.Tensor],
        upstream: Mapping[str, torch.Tensor],
        scalars: Mapping[str, Any],
    ) -> Run:
        """Forward, and the part of backward that forms exact parameter gradients."""
        leaves = [inputs[t.name].to(self.device).detach() for t in self.operator.inputs]
        given = [upstream[t.name].to(self.device) for t in self.operator.outputs]
        with trace() as launches:
            results = self.call(leaves, scalars)
            run = Run({}, self._states(leaves, results, given, scalars))
        run.launches = list(launches)
        self.launches += launches
        return run

    def call(
        self, tensors: Sequence[torch.Tensor], scalars: Mapping[str, Any]
    ) -> tuple[torch.Tensor, ...]:
        """Outputs and saved state of the public path."""
        return self.execution.call(*self.execution.arguments(tensors, scalars, self.backend))

    def _named(self, results: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> Run:
        names = [t.name for t in self.operator.outputs + self.operator.saved]
        tensors = dict(zip(names, results, strict=True))
        for declared, gradient in zip(self.operator.differentiable, gradients, strict=True):
            tensors[f"d{declared.name}"] = gradient
        return Run({name: t.detach() for name, t in tensors.items()}, {})

    def _states(
        self,
        leaves: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        scalars: Mapping[str, Any],
    ) -> dict[str, torch.Tensor]:
        saved = results[len(self.operator.outputs) :]
        parameters = [t.name for t in self.operator.parameters]
        needs = [t.name in parameters for t in self.operator.differentiable]
        *_, backend = arguments = self.execution.arguments(leaves, scalars, self.backend)
        values = arguments[len(leaves) : -1]
        with torch.no_grad():
            gradients = self.execution.backward(*given, *leaves, *saved, *values, *needs, backend)
        named = zip(self.operator.differentiable, gradients, strict=True)
        return {f"d{t.name}": g for t, g in named if t.name in parameters}

    def _wrong_dtypes(self, run: Run, leaves: Sequence[torch.Tensor]) -> list[str]:
        expected = dict(
            zip(
                [t.name for t in self.operator.outputs + self.operator.saved],
                self.execution.empty_outputs(leaves),
                strict=True,
            )
        )
        for declared, leaf in zip(self.operator.inputs, leaves, strict=True):
            expected[f"d{declared.name}"] = leaf
        return [
            f"{name} is {tensor.dtype} {list(tensor.shape)}, declared "
            f"{expected[name].dtype} {list(expected[name].shape)}"
            for name, tensor in run.tensors.items()
            if (tensor.dtype, tensor.shape) != (expected[name].dtype, expected[name].shape)
        ]

    def _wrong_rounding(self, run: Run, leaves: Sequence[torch.Tensor]) -> list[str]:
        faults = []
        for name, state in run.states.items():
            rounded = exact_sum.round(state, run.tensors[name].dtype)
            mismatch = first_mismatch(run.tensors[name], rounded)
            if mismatch is not None:
                faults.append(f"{name} from autograd is not the rounding of its state: {mismatch}")
        return faults
