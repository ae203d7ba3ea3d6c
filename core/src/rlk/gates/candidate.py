# SPDX-License-Identifier: Apache-2.0
"""One run of an operator on one backend, as a user would run it, and what code it ran."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlk.arguments import dtype_name
from rlk.between import observe
from rlk.compare import first_mismatch, same_bits
from rlk.errors import RlkError
from rlk.execution import Execution
from rlk.gates.inputs import Fixture
from rlk.launch import Launch, trace
from rlk.reduce import exact_sum


@dataclass
class Run:
    """Results by name (y, rstd, dx, dweight ...), exact states, and the launches behind them.

    `between` are values between the steps that the backend showed. `directions` are those that
    were called for.

    `given` are the inputs (x, weight ...) and upstream gradients (dy) in the memory that the
    backend saw. `faults` are pairs of a tensor's name and what is wrong with it, in any judgment.
    """

    tensors: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]
    given: dict[str, torch.Tensor] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    faults: list[tuple[str, str]] = field(default_factory=list)
    between: dict[str, torch.Tensor] = field(default_factory=dict)
    directions: tuple[str, ...] = ("forward", "backward")

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """Results and what is between them."""
        return {**self.between, **self.tensors}


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
        gradients: bool = True,
    ) -> Run:
        """Forward and backward through autograd; `states` adds the exact parameter gradients.

        Without `gradients`, forward alone, on inputs that want them.

        A parameter gradient from autograd must be the rounding of that state: anything else is a
        fault of the run.

        Raises:
            RlkError: an output has another dtype than declared, and so no gradient.
        """
        leaves, given = self._placed(inputs, upstream)
        for declared, leaf in zip(self.operator.inputs, leaves, strict=True):
            leaf.requires_grad_(declared.gradient is not None)
        with trace() as launches, observe() as between, fresh_memory_is_nan():
            results = self.call(leaves, scalars)
            outputs = results[: len(self.operator.outputs)]
            wrong = self._wrong_dtypes(leaves, results)
            if wrong and wrong[0][0] in [t.name for t in self.operator.outputs]:
                raise RlkError(f"{self.operator.name}: {wrong[0][1]}")
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found = torch.autograd.grad(outputs, wanted, given) if gradients else ()
            run = self._named(results, found)
            if states:
                again = self._placed(inputs, upstream)
                run.states = self._states(again[0], results, again[1], scalars)
        run.given = self._given(leaves, given)
        run.launches = self._own(launches)
        run.between = between
        run.directions = run.directions if gradients else ("forward",)
        self._last = {**inputs, **{f"d{n}": t for n, t in upstream.items()}, **run.tensors}
        self.launches += run.launches
        run.faults = wrong + _wrong_rounding(run) + _not_normalised(run)
        return run

    def dump(self, folder: Path) -> None:
        """Write the last run's inputs, upstream gradients and results to a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self._last, folder / "last_run.pt")

    def run_fixture(self, fixture: Fixture, **options: bool) -> Run:
        """`run` on a fixture."""
        return self.run(fixture.inputs, fixture.upstream, fixture.scalars, **options)

    def sums(
        self,
        inputs: Mapping[str, torch.Tensor],
        upstream: Mapping[str, torch.Tensor],
        scalars: Mapping[str, Any],
    ) -> Run:
        """Forward, and the part of backward that forms exact parameter gradients."""
        leaves, given = self._placed(inputs, upstream)
        with trace() as launches, fresh_memory_is_nan():
            results = self.call(leaves, scalars)
            run = Run({}, self._states(leaves, results, given, scalars))
        run.launches = self._own(launches)
        self.launches += run.launches
        run.faults = _not_normalised(run)
        return run

    def finished_gradients(self, fixture: Fixture) -> dict[str, torch.Tensor]:
        """Row and chain gradients as the backend returns them, each asked for alone.

        Autograd would cast a wrong dtype, and asks for all of them together.
        """
        names = [t.name for t in self.operator.returned_gradients if t.gradient != "parameter"]
        gradients: dict[str, torch.Tensor] = {}
        for name in names:
            leaves, given = self._placed(fixture.inputs, fixture.upstream)
            results = self.call(leaves, fixture.scalars)
            gradients |= self._backward(leaves, results, given, fixture.scalars, [name])
        return gradients

    def call(
        self, tensors: Sequence[torch.Tensor], scalars: Mapping[str, Any]
    ) -> tuple[torch.Tensor, ...]:
        """Outputs and saved state of the public path."""
        return self.execution.call(*self.execution.arguments(tensors, scalars, self.backend))

    def _own(self, launches: list[Launch]) -> list[Launch]:
        """All launches; of another library, without the sums that are formed for it."""
        row = self.operator.backend(self.backend)
        if row is None or row.ours:
            return list(launches)
        return [launch for launch in launches if launch.backend == self.backend]

    def _placed(
        self, inputs: Mapping[str, torch.Tensor], upstream: Mapping[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return (
            [placed(inputs[t.name], self.device) for t in self.operator.inputs],
            [placed(upstream[t.name], self.device) for t in self.operator.outputs],
        )

    def _given(
        self, leaves: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        named = zip(self.operator.inputs, leaves, strict=True)
        upstream = zip(self.operator.outputs, given, strict=True)
        return {
            **{t.name: leaf.detach() for t, leaf in named},
            **{f"d{t.name}": gradient for t, gradient in upstream},
        }

    def _named(self, results: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> Run:
        names = [t.name for t in self.operator.outputs + self.operator.saved]
        tensors = dict(zip(names, results, strict=True))
        # None where forward ran alone.
        for declared, gradient in zip(self.operator.differentiable, gradients, strict=False):
            tensors[f"d{declared.name}"] = gradient
        return Run({name: t.detach() for name, t in tensors.items()}, {})

    def _states(
        self,
        leaves: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        scalars: Mapping[str, Any],
    ) -> dict[str, torch.Tensor]:
        names = [t.name for t in self.operator.exact_parameters]
        return self._backward(leaves, results, given, scalars, names)

    def _backward(
        self,
        leaves: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        scalars: Mapping[str, Any],
        names: Sequence[str],
    ) -> dict[str, torch.Tensor]:
        outputs = len(self.operator.outputs)
        kept, saved = self.operator.kept(leaves, results[:outputs]), results[outputs:]
        needs = [t.name in names for t in self.operator.returned_gradients]
        *_, backend = arguments = self.execution.arguments(leaves, scalars, self.backend)
        values = arguments[len(leaves) : -1]
        with torch.no_grad():
            gradients = self.execution.backward(*given, *kept, *saved, *values, *needs, backend)
        named = zip(self.operator.returned_gradients, gradients, strict=True)
        return {f"d{t.name}": g for t, g in named if t.name in names}

    def _wrong_dtypes(
        self, leaves: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> list[tuple[str, str]]:
        declared = self.operator.outputs + self.operator.saved
        expected = self.execution.empty_outputs(leaves)
        return [
            (t.name, f"{t.name} must be {dtype_name(e.dtype)}, got {dtype_name(r.dtype)}")
            for t, e, r in zip(declared, expected, results, strict=True)
            if r.dtype != e.dtype
        ]


def placed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on `device` in memory of its own, with the strides and the offset of the original.

    `to` alone would make most views contiguous, and leave a tensor that is there to be shared.
    """
    whole = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = tensor.detach().as_strided((whole,), (1,), 0).to(device, copy=True)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """Fill what `torch.empty` returns, so that an element nobody writes shows.

    Otherwise the allocator hands out the memory of the previous run, right answers included.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _wrong_rounding(run: Run) -> list[tuple[str, str]]:
    faults = []
    for name, state in run.states.items():
        rounded = exact_sum.round(state, run.tensors[name].dtype)
        mismatch = first_mismatch(run.tensors[name], rounded)
        if mismatch is not None:
            fault = f"{name} from autograd is not the rounding of its state: {mismatch}"
            faults.append((name, fault))
    return faults


def _not_normalised(run: Run) -> list[tuple[str, str]]:
    # Ranks add states elementwise: digits that are not carried would overflow there.
    return [
        (name, f"the state of {name} is not normalised")
        for name, state in run.states.items()
        if not same_bits(exact_sum.merge(state, torch.zeros_like(state)), state)
    ]
