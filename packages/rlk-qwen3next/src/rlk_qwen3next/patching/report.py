# SPDX-License-Identifier: Apache-2.0
"""A site of patching, as data and as a row of a table."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class PatchSite:
    """A norm of the model. `reason` says why it was left alone, if it was.

    `operator` is the name of ours that computes it when patched, with these scalars; empty, and
    the scalars None, where there is none. `activation` is None also for a norm without a gate.
    """

    header: ClassVar[tuple[str, ...]] = ("site", "class", "operator", "eps", "activation", "offset")

    path: str
    class_name: str
    operator: str = ""
    eps: float | None = None
    activation: str | None = None
    weight_offset: float | None = None
    reason: str = ""

    def row(self) -> tuple[object, ...]:
        """What a table shows of it."""
        scalars = (self.eps, self.activation, self.weight_offset)
        return (self.path, self.class_name, self.operator, *scalars)
