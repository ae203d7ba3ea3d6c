# SPDX-License-Identifier: Apache-2.0
"""Which modules of a model have a replacement, what stands against it, and the exchange."""

import importlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from rlk.errors import ArgumentError, PlatformError

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


Site = tuple[str, nn.Module, Replacement | None]


def replacements(name: str) -> tuple[Replacement, ...]:
    """Every replacement that this process may need.

    Raises:
        PlatformError: transformers is missing or outside the supported range.
    """
    _require_transformers(name)
    from . import transformers_norms

    pairs = transformers_norms.REPLACEMENTS
    # A module of FLA can only be there if somebody imported its class.
    if "fla.modules" in sys.modules:
        from . import fla_norms

        pairs += fla_norms.REPLACEMENTS
    return pairs


def _require_transformers(name: str) -> None:
    oldest, newest = OLDEST_TRANSFORMERS, NEWEST_TRANSFORMERS
    try:
        found = importlib.import_module("transformers").__version__
    except ImportError:
        found = "none"
    release = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
    if not _numbers(oldest) <= release or release[:2] > _numbers(newest):
        raise PlatformError(
            f"{name}: transformers must be {oldest} or newer and at most {newest}, got {found}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def find_sites(model: nn.Module, pairs: Sequence[Replacement]) -> list[Site]:
    """Every norm of the model, each once, with its replacement if there is one."""
    sites: list[Site] = []
    for path, module in model.named_modules():
        pair = next((pair for pair in pairs if isinstance(module, pair.theirs)), None)
        if pair is not None or type(module).__name__.endswith(("Norm", "NormGated")):
            sites.append((path, module, pair))
    return sites


def obstacle(module: nn.Module, pair: Replacement | None, to_ours: bool) -> str | None:
    """Why a module must be left alone, or None."""
    if pair is None:
        return f"rlk_qwen3next has no replacement for a class of {type(module).__module__}"
    if "forward" in vars(module) and not _bound_forwards(module):
        return "its forward is set on the instance"
    own = _own_class(module)
    if own is (pair.ours if to_ours else pair.theirs):
        return "it is patched already" if to_ours else "it is not patched"
    if own not in (pair.theirs, pair.ours):
        return f"its class is derived from {pair.theirs.__name__}"
    return _uncomputable(module, pair) if to_ours else None


def change_class(module: nn.Module, pair: Replacement, to_ours: bool) -> None:
    """Exchange the class of one module."""
    old, new = (pair.theirs, pair.ours) if to_ours else (pair.ours, pair.theirs)
    bound = _bound_forwards(module)
    module.__class__ = _with_base(type(module), old, new)
    for name in bound:
        setattr(module, name, MethodType(new.forward, module))


def _bound_forwards(module: nn.Module) -> list[str]:
    """Where the module itself holds the forward of its class: accelerate calls it from there."""
    found = {name: vars(module).get(name) for name in ("forward", "_old_forward")}
    own = type(module).forward
    return [n for n, f in found.items() if isinstance(f, MethodType) and f.__func__ is own]


def _uncomputable(module: nn.Module, pair: Replacement) -> str | None:
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
    return None


def _own_class(module: nn.Module) -> type:
    """The class of a module, below the one that fully_shard makes on the spot."""
    cls = type(module)
    return next(b for b in cls.__bases__ if issubclass(b, nn.Module)) if _is_sharded(cls) else cls


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
