# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a model have an exact gradient, and why the others have none.

A module, or its class, says it by two attributes. `exact_sums` maps the path of a parameter, from
the module on, to the attribute from which its forward reads the carrier, {"weight": "weight_sum"};
the class sets that one to None. `chain_sums` does so for parameters whose gradient is a chain,
whose attribute holds a pair of leaves.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from rlk.carried import is_dtensor
from rlk.errors import ArgumentError

Guarantee = Literal["exact", "chain", "ordinary"]
# A module, and the attribute from which it reads a carrier, or that is a parameter.
Place = tuple[nn.Module, str]


@dataclass(frozen=True)
class ParameterGradient:
    """How the gradient of a parameter adds up.

    "exact": the exact sum over all rows, calls and ranks, rounded once. "chain": one chain over the
    calls of a rank; `reason` says what its bits depend on. "ordinary": as PyTorch's do, rounded in
    every call and every addition; `reason` says why.
    """

    name: str
    guarantee: Guarantee
    reason: str = ""


@dataclass(frozen=True)
class AccumulationReport:
    """Every parameter; prints as a table."""

    parameters: tuple[ParameterGradient, ...]

    @property
    def exact(self) -> tuple[str, ...]:
        """The names of those whose gradient is the exact sum, rounded once."""
        return self._named("exact")

    @property
    def chain(self) -> tuple[str, ...]:
        """The names of those whose gradient is a chain, continued from call to call."""
        return self._named("chain")

    @property
    def ordinary(self) -> tuple[str, ...]:
        """The names of those that the block leaves to the caller, sums over ranks included."""
        return self._named("ordinary")

    def _named(self, guarantee: Guarantee) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters if p.guarantee == guarantee)

    def __str__(self) -> str:
        width = max((len(p.name) for p in self.parameters), default=0)
        lines = [
            f"{p.name:{width}}  {p.guarantee}" + (f": {p.reason}" if p.reason else "")
            for p in self.parameters
        ]
        counts = f"{len(self.exact)} exact, "
        counts += f"{len(self.chain)} chain, " if self.chain else ""
        return "\n".join([*lines, f"{counts}{len(self.ordinary)} ordinary"])


@dataclass(frozen=True)
class Found:
    """A parameter, how it adds up, and the modules and attributes that read its carrier.

    `homes` are the modules that have it, each with its name there.
    """

    name: str
    parameter: nn.Parameter
    guarantee: Guarantee
    reason: str = ""
    places: list[Place] = field(default_factory=list)
    homes: list[Place] = field(default_factory=list)

    @property
    def is_replaced(self) -> bool:
        """Whether a module has another parameter in its place; FSDP2's shard and whole aside."""
        now = [home._parameters.get(name) for home, name in self.homes]
        others = [p for p in now if p is not None and p is not self.parameter]
        return not is_dtensor(self.parameter) and not all(map(is_dtensor, others))


def find(module: nn.Module, continue_chains: bool = False) -> list[Found]:
    """Every parameter of a module once, tied ones under their first name."""
    sums, chains = _places(module, "exact_sums"), _places(module, "chain_sums")
    owners: dict[int, list[tuple[str, Place]]] = defaultdict(list)
    for path, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            owners[id(parameter)].append((path, (owner, name)))
    found = []
    for name, parameter in module.named_parameters():
        owned = [(path, (id(home), key)) for path, (home, key) in owners[id(parameter)]]
        homes = [place for _, place in owners[id(parameter)]]
        others = [path for path, key in owned if key not in sums]
        chained = [place for _, key in owned for place in chains.get(key, ())]
        guarantee: Guarantee = "ordinary"
        reason, places = "", [place for _, key in owned for place in sums.get(key, ())]
        if not parameter.requires_grad:
            reason = "it requires no gradient"
        elif chained and not continue_chains:
            reason = "its gradient is a chain over rows, finished in every call"
        elif chained and len(owned) == len(chained) == 1:
            guarantee, places = "chain", chained
        elif chained:
            reason = "its gradient is a chain over rows, and several modules use it"
        elif len(others) == len(owned):
            reason = "no operator of ours forms its gradient"
        elif others:
            reason = f"{others[0] or 'the module itself'} uses it too"
        else:
            guarantee = "exact"
        found.append(Found(name, parameter, guarantee, reason, places, homes))
    return found


def restrict(
    found: list[Found], parameters: Iterable[torch.Tensor] | None, name: str
) -> list[Found]:
    """Those among `parameters`, in the order of the module; all if None.

    Raises:
        ArgumentError: there is one that the module does not have; `name` begins the message.
    """
    if parameters is None:
        return found
    # By identity: equality of tensors is elementwise.
    wanted = {id(p): p for p in parameters}
    chosen = [f for f in found if wanted.pop(id(f.parameter), None) is not None]
    for other in wanted.values():
        is_tensor = isinstance(other, torch.Tensor)
        got = f"one of shape {list(other.shape)}" if is_tensor else f"a {type(other).__name__}"
        raise ArgumentError(f"{name}: parameters must be those of module, got {got} that is none")
    return chosen


def _places(module: nn.Module, declared: str) -> dict[tuple[int, str], list[Place]]:
    """By owner, a module and a name in it, as a tied parameter has several: who reads carriers."""
    places: dict[tuple[int, str], list[Place]] = defaultdict(list)
    for holder in module.modules():
        for path, attribute in getattr(holder, declared, {}).items():
            places[_owner(holder, path)].append((holder, attribute))
    return places


def _owner(holder: nn.Module, path: str) -> tuple[int, str]:
    """The module that owns a parameter, by identity, and the parameter's name there."""
    *modules, name = path.split(".")
    owner: object = holder
    for part in modules:
        owner = getattr(owner, part, None)
    return id(owner), name
