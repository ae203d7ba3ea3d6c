# SPDX-License-Identifier: Apache-2.0
"""How a fault is planted into an operator, and which records it turns red."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from rlk import backends
from rlk.gates import Record, cases, judge
from rlk.operator import Operator


@dataclass(frozen=True)
class Fault:
    """A wrong operator and what the gates must say: judgment -> names of the red tensors.

    Records of a case that raised carry no tensor: their name is "".
    """

    name: str
    operator: Operator
    red: Mapping[str, str]
    dtype: str = "float32"
    tier: str = "short"

    def records(self) -> list[Record]:
        """Every record in one dtype of the judgments that need no GPU, on the first backend."""
        planned = cases([self.operator], backend=self.operator.backends[0].name, tier=self.tier)
        return [
            record
            for case in planned
            if case.dtype == self.dtype and case.judgment != "gpu_to_gpu"
            for record in judge(case)
        ]

    @property
    def expected(self) -> set[tuple[str, str]]:
        """The red (judgment, tensor) pairs."""
        return {(j, tensor) for j, names in self.red.items() for tensor in names.split(" ")}


def red(records: list[Record]) -> set[tuple[str, str]]:
    """The (judgment, tensor) pairs in which anything failed."""
    return {(r.judgment, r.tensor) for r in records if r.status == "failed"}


def plant(operator: Operator, module: Any, row: Callable[..., Any] = backends.golden) -> Operator:
    """The operator with `module` as its only backend, under the name that `row` gives it."""
    return replace(operator, backends=(row(lambda: module),))


def rebound(module: ModuleType, **steps: Any) -> SimpleNamespace:
    """A copy of a module in which some names mean something else, for its own functions too."""
    namespace = {**vars(module), **steps}
    for name, value in vars(module).items():
        if isinstance(value, FunctionType) and value.__module__ == module.__name__:
            if name not in steps:
                copy = FunctionType(value.__code__, namespace, name, value.__defaults__)
                copy.__kwdefaults__ = value.__kwdefaults__
                namespace[name] = copy
    return SimpleNamespace(**namespace)


def changed(function: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its tuple of results passed through `change`."""
    return lambda *tensors, **options: change(*function(*tensors, **options))
