# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a model have an exact gradient, and why the others have none.

A module, or its class, says it by two attributes. `exact_sums` maps the path of a parameter, from
the module on, to the attribute from which its forward reads the carrier, {"weight": "weight_sum"};
the class sets that one to None. `chain_sums` names parameters whose gradient is a chain.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn


@dataclass(frozen=True)
class ParameterGradient:
    """How the gradient of a parameter adds up: exactly, or, for a reason, as PyTorch's do."""

    name: str
    reason: str = ""

    @property
    def exact(self) -> bool:
        """Whether it is the exact sum, rounded once."""
        return not self.reason


@dataclass(frozen=True)
class AccumulationReport:
    """Every parameter of a module; prints as a table."""

    parameters: tuple[ParameterGradient, ...]

    @property
    def exact(self) -> tuple[str, ...]:
        """The names of those whose gradient is the exact sum, rounded once."""
        return tuple(p.name for p in self.parameters if p.exact)

    @property
    def ordinary(self) -> tuple[str, ...]:
        """The names of those whose gradient is rounded in every call and every addition."""
        return tuple(p.name for p in self.parameters if not p.exact)

    def __str__(self) -> str:
        width = max((len(p.name) for p in self.parameters), default=0)
        lines = [
            f"{p.name:{width}}  " + ("exact" if p.exact else f"ordinary: {p.reason}")
            for p in self.parameters
        ]
        return "\n".join([*lines, f"{len(self.exact)} exact, {len(self.ordinary)} ordinary"])


@dataclass(frozen=True)
class Found:
    """A parameter, and the modules and attributes from which its carrier is read."""

    name: str
    parameter: nn.Parameter
    reason: str
    places: list[tuple[nn.Module, str]] = field(default_factory=list)


def find(module: nn.Module) -> list[Found]:
    """Every parameter of a module once, tied ones under their first name."""
    # By owner, a module and a name in it: a tied parameter has several.
    places: dict[tuple[int, str], list[tuple[nn.Module, str]]] = defaultdict(list)
    chains: set[tuple[int, str]] = set()
    for holder in module.modules():
        for path, attribute in getattr(holder, "exact_sums", {}).items():
            places[_owner(holder, path)].append((holder, attribute))
        chains |= {_owner(holder, path) for path in getattr(holder, "chain_sums", ())}
    owners: dict[int, list[tuple[str, tuple[int, str]]]] = defaultdict(list)
    for path, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            owners[id(parameter)].append((path, (id(owner), name)))
    found = []
    for name, parameter in module.named_parameters():
        owned = owners[id(parameter)]
        others = [path for path, key in owned if key not in places]
        reason = ""
        if not parameter.requires_grad:
            reason = "it requires no gradient"
        elif any(key in chains for _, key in owned):
            reason = "its gradient is a chain over rows, finished in every call"
        elif len(others) == len(owned):
            reason = "no operator of ours forms its gradient"
        elif others:
            reason = f"{others[0] or 'the module itself'} uses it too"
        read_by = [place for _, key in owned for place in places.get(key, ())]
        found.append(Found(name, parameter, reason, read_by))
    return found


def exact(module: nn.Module) -> Iterator[Found]:
    """Those whose gradient is an exact sum."""
    return (found for found in find(module) if not found.reason)


def _owner(holder: nn.Module, path: str) -> tuple[int, str]:
    """The module that owns a parameter, by identity, and the parameter's name there."""
    *modules, name = path.split(".")
    owner: object = holder
    for part in modules:
        owner = getattr(owner, part, None)
    return id(owner), name
