# SPDX-License-Identifier: Apache-2.0
"""A site of patching, as data and as a row of a table."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class PatchSite:
    """A place in the model. `reason` says why it was left alone, if it was.

    `operator` is the name of the one that computes it when patched; empty where there is none.
    `eps` is None where the site has none.
    """

    header: ClassVar[tuple[str, ...]] = ("site", "class", "operator", "eps")

    path: str
    class_name: str
    operator: str = ""
    eps: float | None = None
    reason: str = ""

    def row(self) -> tuple[object, ...]:
        """What a table shows of it."""
        return (self.path, self.class_name, self.operator, self.eps)
