# SPDX-License-Identifier: Apache-2.0
"""Our forward in a module of another library, by a change of its class, and what was changed.

A module gets a class derived from its own. So its parameters, its state, its hooks and everything
that holds it stay; copies and pickles of it are patched, too.
"""

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import nn

from rlk.errors import ArgumentError, PlatformError


class Described(Protocol):
    """What a report says of a place in a model; `header` names what `row` shows."""

    header: ClassVar[tuple[str, ...]]

    @property
    def reason(self) -> str:
        """Why it was left alone, if it was."""

    def row(self) -> tuple[object, ...]:
        """What a table shows of it; None and "" are shown as a dash."""


S = TypeVar("S", bound=Described)
D = TypeVar("D", bound=Described, covariant=True)


class Site(Protocol[D]):
    """A place in a model that an operator of ours may compute."""

    def described(self, to_ours: bool) -> D:
        """The place as it is now, with the reason against changing it, if there is one."""

    def change(self, to_ours: bool) -> None:
        """Exchange the classes of its modules."""


@dataclass(frozen=True)
class PatchReport(Generic[S]):
    """The sites that `patch` or `unpatch` changed, and those that it left alone."""

    name: str
    changed: tuple[S, ...]
    left: tuple[S, ...]

    @staticmethod
    def of(name: str, sites: list[S]) -> "PatchReport[S]":
        """The report on these sites: those without a reason against it were changed."""
        changed = tuple(site for site in sites if not site.reason)
        return PatchReport(name, changed, tuple(site for site in sites if site.reason))

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = []
        for site in (*self.changed, *self.left):
            shown = ("-" if value in (None, "") else str(value) for value in site.row())
            outcome = f"left alone: {site.reason}" if site.reason else f"{self.name}ed"
            rows = rows or [(*site.header, "")]
            rows.append((*shown, outcome))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join(
            [*lines, f"{len(self.changed)} {self.name}ed, {len(self.left)} left alone"]
        )


def exchange(
    name: str, model: object, find: Callable[[nn.Module], Sequence[Site[S]]], part: str
) -> PatchReport[S]:
    """Change the classes of every site of a model that nothing stands against.

    Args:
        name: `patch`, which changes them to ours, or `unpatch`.
        model: what the user handed over.
        find: the sites of a module, none if it is no model of the family.
        part: what the model must hold, for the message.
    Raises:
        ArgumentError: model is no module or holds no site.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"{name}: model must be a torch.nn.Module, got {type(model).__name__}")
    sites = find(model)
    if not sites:
        raise ArgumentError(
            f"{name}: model must hold {part}, got {type(model).__name__} without one"
        )
    to_ours = name == "patch"
    described = [site.described(to_ours) for site in sites]
    # Nothing above changes a model: an error leaves it whole.
    for site, description in zip(sites, described, strict=True):
        if not description.reason:
            site.change(to_ours)
    return PatchReport.of(name, described)


def require_release(name: str, library: str, oldest: str, newest: str, package: str) -> None:
    """Refuse to go on beside a release of a library that the tests do not cover.

    Args:
        name: of the function that needs it, for the message.
        library: as imported.
        oldest: the first release that is supported.
        newest: the last one, or the last series where fewer numbers are given.
        package: ours, whose extra of the library's name installs it.
    Raises:
        PlatformError: the library is missing or outside the range.
    """
    try:
        found = importlib.import_module(library).__version__
    except ImportError:
        found = "none"
    release = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
    first, last = _numbers(oldest), _numbers(newest)
    if not first <= release or release[: len(last)] > last:
        raise PlatformError(
            f"{name}: {library} must be {oldest} or newer and at most {newest}, got {found}; "
            f'pip install "{package}[{library}]"'
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def own_class(module: Any) -> type:
    """The class of a module, below the one that fully_shard makes on the spot."""
    cls = type(module)
    return next(b for b in cls.__bases__ if issubclass(b, nn.Module)) if _is_sharded(cls) else cls


def has_other_forward(module: Any) -> bool:
    """Whether something else than accelerate has set the forward of this very instance."""
    return "forward" in vars(module) and not _bound_forwards(module)


def change_class(module: Any, old: type, new: type) -> None:
    """Let a module, whose own class is `old`, be one of `new`."""
    bound = _bound_forwards(module)
    module.__class__ = _with_base(type(module), old, new)
    for name in bound:
        setattr(module, name, MethodType(new.forward, module))  # type: ignore[attr-defined]


def _bound_forwards(module: Any) -> list[str]:
    """Where the module itself holds the forward of its class: accelerate calls it from there."""
    found = {name: vars(module).get(name) for name in ("forward", "_old_forward")}
    own = getattr(type(module), "forward", None)
    return [n for n, f in found.items() if isinstance(f, MethodType) and f.__func__ is own]


def _is_sharded(cls: type) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return FSDPModule in cls.__bases__


def _with_base(cls: type, old: type, new: type) -> type:
    """`new` for `old`, or the same class of fully_shard above `new`."""
    if cls is old:
        return new
    body = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    return type(cls.__name__, tuple(new if b is old else b for b in cls.__bases__), body)
