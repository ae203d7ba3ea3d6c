# SPDX-License-Identifier: Apache-2.0
"""One call of a declared operator, and the results that every feature must leave as they are."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlk.compare import assert_same_bits
from rlk.gates.inputs import Fixture, Values, fixture, smallest_sizes
from rlk.operator import Operator
from rlk.publish import PUBLISHED, Published

# (3, 5): two leading axes of unlike, odd lengths.
LEADING = (3, 5)


@dataclass(frozen=True)
class Sample:
    """Inputs and upstream gradients of one call, with several leading axes."""

    operator: Operator
    batch: Fixture

    @property
    def published(self) -> Published:
        """The operator as its public function calls it."""
        return PUBLISHED[self.operator.name]

    @property
    def differentiable(self) -> list[str]:
        """The names of the inputs that take gradients."""
        return [t.name for t in self.operator.differentiable]

    @property
    def row_inputs(self) -> list[torch.Tensor]:
        """What `OperatorModule` is called with: every input that is no parameter."""
        parameters = [t.name for t in self.operator.parameters]
        return [t for name, t in self.batch.inputs.items() if name not in parameters]

    def call(self, *tensors: Any) -> tuple[torch.Tensor, ...]:
        """The outputs, by way of the public function's call."""
        return self.published(tensors, self.batch.scalars)

    def leaves(self, wanted: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """The inputs as leaves of a graph, the wanted ones with gradients; all by default."""
        chosen = self.differentiable if wanted is None else list(wanted)
        return {
            name: tensor.detach().requires_grad_(name in chosen)
            for name, tensor in self.batch.inputs.items()
        }

    def results(
        self,
        function: Callable[..., Any] | None = None,
        wanted: Sequence[str] | None = None,
        upstream: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Outputs and gradients by name, of the eager call or of a function in its place."""
        leaves = self.leaves(wanted)
        outputs = (function or self.call)(*leaves.values())
        given = (upstream or self.batch.upstream).values()
        named = {n: t for n, t in leaves.items() if t.requires_grad}
        gradients = torch.autograd.grad(outputs, list(named.values()), list(given))
        names = [t.name for t in self.operator.outputs]
        found = dict(zip(names, (t.detach() for t in outputs), strict=True))
        return found | {f"d{n}": g for n, g in zip(named, gradients, strict=True)}

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Sample":
        """The same call with every tensor changed."""
        batch = replace(
            self.batch,
            inputs={n: change(t) for n, t in self.batch.inputs.items()},
            upstream={n: change(t) for n, t in self.batch.upstream.items()},
        )
        return replace(self, batch=batch)

    def rows(self, start: int, stop: int) -> "Sample":
        """The same call on some of the first leading axis."""
        with_rows = {t.name for t in self.operator.inputs if t.has_rows}
        batch = replace(
            self.batch,
            inputs={
                n: t[start:stop] if n in with_rows else t for n, t in self.batch.inputs.items()
            },
            upstream={n: t[start:stop] for n, t in self.batch.upstream.items()},
        )
        return replace(self, batch=batch)


def sample(
    operator: Operator,
    device: str = "cpu",
    *,
    leading: tuple[int, ...] = LEADING,
    dtype: str = "float32",
    seed: int = 3,
    values: Values | None = None,
    parameter_dtype: str | None = None,
) -> Sample:
    """A call at the operator's smallest real width."""
    batch = fixture(
        operator,
        dtype,
        rows=torch.Size(leading).numel(),
        sizes=smallest_sizes(operator),
        seed=seed,
        values=values,
        parameter_dtype=parameter_dtype,
    )
    with_rows = {t.name for t in operator.inputs if t.has_rows}
    inputs = {
        name: (t.view(*leading, *t.shape[1:]) if name in with_rows else t).to(device)
        for name, t in batch.inputs.items()
    }
    upstream = {n: t.view(*leading, *t.shape[1:]).to(device) for n, t in batch.upstream.items()}
    return Sample(operator, Fixture(inputs, upstream, batch.scalars))


class OperatorModule(torch.nn.Module):
    """An operator as a module: its parameters are parameters, all other inputs are arguments."""

    def __init__(self, made: Sample) -> None:
        super().__init__()
        self.name = made.operator.name
        self.scalars = made.batch.scalars
        # As modules of ours say it, by their class.
        self.exact_sums = {t.name: f"{t.name}_sum" for t in made.operator.exact_parameters}
        self.chain_sums = {t.name: f"{t.name}_chain" for t in made.operator.chain_parameters}
        for declared in made.operator.parameters:
            value = made.batch.inputs[declared.name].detach().clone()
            self.register_parameter(declared.name, torch.nn.Parameter(value))

    def forward(self, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs."""
        published = PUBLISHED[self.name]
        given = iter(rows)
        tensors = [
            getattr(self, t.name) if t.is_parameter else next(given)
            for t in published.operator.inputs
        ]
        carriers = [getattr(self, name, None) for name in self.exact_sums.values()]
        for name in self.chain_sums.values():
            carriers += getattr(self, name, None) or (None, None)
        return published(tensors, self.scalars, None, carriers)


def module_results(
    module: torch.nn.Module, made: Sample, parameters: Sequence[torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Outputs, row gradients and `.grad` of parameters after a backward through a module."""
    with_gradient = [t for t in made.operator.inputs if not t.is_parameter]
    rows = [
        tensor.detach().requires_grad_(t.gradient is not None)
        for t, tensor in zip(with_gradient, made.row_inputs, strict=True)
    ]
    outputs = module(*rows)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, list(made.batch.upstream.values()))
    found = dict(zip([t.name for t in made.operator.outputs], outputs, strict=True))
    found |= {f"d{t.name}": r.grad for t, r in zip(with_gradient, rows, strict=True) if t.gradient}
    named = zip(made.operator.parameters, parameters or module.parameters(), strict=True)
    return found | {f"d{t.name}": p.grad for t, p in named}


def assert_same_results(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], where: str = ""
) -> None:
    """Every result is there, with the expected bits."""
    if set(actual) != set(expected):
        raise AssertionError(f"{where}: results {sorted(actual)} instead of {sorted(expected)}")
    for name, tensor in expected.items():
        assert_same_bits(actual[name], tensor, f"{name} {where}")
