# SPDX-License-Identifier: Apache-2.0
"""Which modules of a model have a replacement, what stands against it, and the exchange."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from rlk.errors import ArgumentError
from rlk.patching import change_class, has_other_forward, own_class, require_release

from .report import PatchSite

# The oldest release and the newest series of transformers that the tests cover, both included.
OLDEST_TRANSFORMERS = "4.57.1"
NEWEST_TRANSFORMERS = "5.17"


@dataclass(frozen=True)
class Replacement:
    """A class of theirs, the class derived from it that computes as ours, and our module."""

    theirs: type[nn.Module]
    ours: type[nn.Module]
    module: Any
    eps_name: str  # the attribute that holds it

    def scalars(self, module: nn.Module) -> dict[str, Any]:
        """eps, or None, and the activation where there is a gate, as in the module."""
        found: dict[str, Any] = {"eps": getattr(module, self.eps_name, None)}
        default = getattr(self.ours, "activation", None)
        activation = getattr(module, "activation", default)
        if activation is not None:
            found["activation"] = activation
        return found


@dataclass(frozen=True)
class Site:
    """A norm of the model, and its replacement if there is one."""

    path: str
    module: nn.Module
    pair: Replacement | None

    def described(self, to_ours: bool) -> PatchSite:
        """The norm as it is now, with the reason against changing it."""
        class_name, reason = type(self.module).__name__, self._obstacle(to_ours)
        if self.pair is None:
            return PatchSite(self.path, class_name, reason=reason)
        operator = self.pair.module.operator
        offset = next(s.default for s in operator.scalars if s.name == "weight_offset")
        return PatchSite(
            self.path,
            class_name,
            operator.name,
            weight_offset=float(offset),
            reason=reason,
            **self.pair.scalars(self.module),
        )

    def change(self, to_ours: bool) -> None:
        """Exchange its class."""
        if self.pair is not None:
            old, new = self.pair.theirs, self.pair.ours
            change_class(self.module, *((old, new) if to_ours else (new, old)))

    def _obstacle(self, to_ours: bool) -> str:
        """Why it must be left alone, or nothing."""
        module, pair = self.module, self.pair
        if pair is None:
            return f"rlk_qwen3next has no replacement for a class of {type(module).__module__}"
        if has_other_forward(module):
            return "its forward is set on the instance"
        own = own_class(module)
        if own is (pair.ours if to_ours else pair.theirs):
            return "it is patched already" if to_ours else "it is not patched"
        if own not in (pair.theirs, pair.ours):
            return f"its class is derived from {pair.theirs.__name__}"
        return _uncomputable(module, pair) if to_ours else ""


def replacements(name: str) -> tuple[Replacement, ...]:
    """Every replacement that this process may need.

    Raises:
        PlatformError: transformers is missing or outside the supported range.
    """
    supported = (OLDEST_TRANSFORMERS, NEWEST_TRANSFORMERS)
    require_release(name, "transformers", *supported, "rlk-qwen3next")
    from . import transformers_norms

    pairs = transformers_norms.REPLACEMENTS
    # A module of FLA can only be there if somebody imported its class.
    if "fla.modules" in sys.modules:
        from . import fla_norms

        pairs += fla_norms.REPLACEMENTS
    return pairs


def find_sites(model: nn.Module, pairs: Sequence[Replacement]) -> list[Site]:
    """Every norm of the model, each once; empty without one of Qwen3-Next."""
    sites: list[Site] = []
    for path, module in model.named_modules():
        pair = next((pair for pair in pairs if isinstance(module, pair.theirs)), None)
        if pair is not None or type(module).__name__.endswith(("Norm", "NormGated")):
            sites.append(Site(path, module, pair))
    return sites if any(site.pair for site in sites) else []


def _uncomputable(module: nn.Module, pair: Replacement) -> str:
    if getattr(module, "weight", None) is None:
        return "it has no weight"
    if getattr(module, "bias", None) is not None:
        return "it has a bias"
    if getattr(module, pair.eps_name, None) is None:
        return f"it has no {pair.eps_name}"
    try:
        pair.module(1, **pair.scalars(module))
    except ArgumentError as error:
        return str(error)
    return ""
