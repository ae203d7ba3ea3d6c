# SPDX-License-Identifier: Apache-2.0
"""A site with the modules whose classes change together, and what stands against it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlk.patching import change_class, has_other_forward, own_class

from .report import PatchSite


def kind(holder: Any) -> str:
    """The full name of an object's class."""
    return f"{type(holder).__module__}.{type(holder).__name__}"


@dataclass(frozen=True)
class Part:
    """An object of a model, its class in diffusers, and the one derived from it."""

    name: str  # within its site; empty for the site itself
    holder: Any
    theirs: type
    ours: type

    def is_ours(self) -> bool:
        """Whether it is patched."""
        return own_class(self.holder) is self.ours

    def obstacle(self, to_ours: bool) -> str:
        """What stands against changing its class, if anything."""
        # Others may replace a forward that stays theirs.
        if "forward" in vars(self.ours) and has_other_forward(self.holder):
            return f"{self._of('forward')} is set on the instance"
        if to_ours and own_class(self.holder) not in (self.theirs, self.ours):
            if isinstance(self.holder, self.theirs):
                return f"{self._of('class')} is derived from {self.theirs.__name__}"
            return f"{self.name or 'it'} is {kind(self.holder)}, not {self.theirs.__name__}"
        return ""

    def _of(self, what: str) -> str:
        return f"the {what} of {self.name}" if self.name else f"its {what}"

    def change(self, to_ours: bool) -> None:
        """Exchange its class, unless it has the wanted one."""
        old, new = (self.theirs, self.ours) if to_ours else (self.ours, self.theirs)
        if own_class(self.holder) is old:
            change_class(self.holder, old, new)


@dataclass(frozen=True)
class Site:
    """A place where an operator of ours can compute; `parts` are empty where it cannot."""

    path: str
    module: Any
    operator: str = ""
    eps: float | None = None
    parts: tuple[Part, ...] = ()
    # Why the operator does not compute what is there, if so; asked only of parts of known classes.
    unfit: Callable[[], str] = lambda: ""

    def described(self, to_ours: bool) -> PatchSite:
        """The site as it is now, with the reason against changing it."""
        class_name = type(self.module).__name__
        return PatchSite(self.path, class_name, self.operator, self.eps, self._reason(to_ours))

    def change(self, to_ours: bool) -> None:
        """Exchange the classes of all parts."""
        for part in self.parts:
            part.change(to_ours)

    def _reason(self, to_ours: bool) -> str:
        ours = [part.is_ours() for part in self.parts]
        if self.parts and to_ours and all(ours):
            return "it is patched already"
        if not to_ours and not any(ours):
            return "it is not patched"
        obstacles = (part.obstacle(to_ours) for part in self.parts)
        return next(filter(None, obstacles), "") or (self.unfit() if to_ours else "")
