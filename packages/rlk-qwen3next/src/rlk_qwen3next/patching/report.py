# SPDX-License-Identifier: Apache-2.0
"""What patching did to a model, as data and as a table."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from .sites import Replacement

HEADER = ("site", "class", "operator", "eps", "activation", "offset", "")


@dataclass(frozen=True)
class PatchSite:
    """A norm of the model. `reason` says why it was left alone, if it was.

    `operator` is the name of ours that computes it when patched, with these scalars; empty, and
    the scalars None, where there is none. `activation` is None also for a norm without a gate.
    """

    path: str
    class_name: str
    operator: str = ""
    eps: float | None = None
    activation: str | None = None
    weight_offset: float | None = None
    reason: str = ""

    @staticmethod
    def of(
        path: str, module: nn.Module, pair: "Replacement | None", reason: str | None
    ) -> "PatchSite":
        """A module as it is now."""
        class_name = type(module).__name__
        if pair is None:
            return PatchSite(path, class_name, reason=reason or "")
        operator = pair.module.operator
        offset = next(s.default for s in operator.scalars if s.name == "weight_offset")
        return PatchSite(
            path,
            class_name,
            operator.name,
            weight_offset=float(offset),
            reason=reason or "",
            **pair.scalars(module),
        )


@dataclass(frozen=True)
class PatchReport:
    """The sites that `patch` or `unpatch` changed, and the norms that it left alone."""

    name: str
    changed: tuple[PatchSite, ...]
    left: tuple[PatchSite, ...]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [HEADER]
        for site in (*self.changed, *self.left):
            scalars = (site.eps, site.activation, site.weight_offset)
            shown = ("-" if scalar is None else f"{scalar}" for scalar in scalars)
            outcome = f"left alone: {site.reason}" if site.reason else f"{self.name}ed"
            rows.append((site.path, site.class_name, site.operator or "-", *shown, outcome))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join(
            [*lines, f"{len(self.changed)} {self.name}ed, {len(self.left)} left alone"]
        )
