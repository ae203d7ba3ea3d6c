# SPDX-License-Identifier: Apache-2.0
"""Who takes part: our backends, the operator's formula in PyTorch, and other libraries.

An operator's folder may hold prior_art.py with PEERS, a tuple of `Peer`.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch

from rlk import dispatch
from rlk.errors import BackendError, PlatformError
from rlk.operator import Operator

Call = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
OURS = ("cuda", "triton")


@dataclass(frozen=True)
class Peer:
    """Another library's function of the same formula; or, if `ours`, our own in another way.

    `make` imports it, given scalars and the workload's arguments, and returns what maps the
    operator's inputs to its outputs; it raises ImportError where the library is absent.
    """

    name: str
    distribution: str
    make: Callable[[Mapping[str, Any]], Call]
    ours: bool = False


@dataclass(frozen=True)
class Variant:
    """A function to be measured, or why there is none."""

    name: str
    version: str
    call: Call | None
    missing: str | None = None
    ours: bool = False


def variants(
    operator: Operator, scalars: Mapping[str, Any], arguments: Mapping[str, Any]
) -> list[Variant]:
    """Our backends first, then PyTorch and the peers; `arguments` are those of the workload."""
    told = {**scalars, **arguments}
    found = [_ours(operator, name, told) for name in OURS]
    found.append(Variant("torch.compile", torch.__version__, _compiled(operator, scalars)))
    return found + [peer_variant(peer, told) for peer in getattr(prior_art(operator), "PEERS", ())]


def public_call(operator: Operator, backend: str, told: Mapping[str, Any]) -> Call:
    """Our public function on one backend.

    Args:
        operator: its declaration.
        backend: a declared name.
        told: scalars and further arguments.
    Raises:
        BackendError, PlatformError: it cannot run on the current GPU.
    """
    function = getattr(importlib.import_module(operator.package), operator.name)
    dispatch.choose(operator, torch.device("cuda", torch.cuda.current_device()), backend)

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return function(*tensors, **told, backend=backend)

    return call


def _ours(operator: Operator, backend: str, told: Mapping[str, Any]) -> Variant:
    try:
        return Variant(backend, "", public_call(operator, backend, told), ours=True)
    except (BackendError, PlatformError) as error:
        return Variant(backend, "", None, str(error), ours=True)


def _compiled(operator: Operator, scalars: Mapping[str, Any]) -> Call:
    """The textbook formula in FP32, rounded once at the end, as a compiler fuses it."""
    fixed = {s.name: s.default for s in operator.scalars}

    def formula(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = operator.oracle(*(t.float() for t in tensors), **{**fixed, **scalars})
        return tuple(t.to(tensors[0].dtype) for t in results[: len(operator.outputs)])

    torch._dynamo.reset()
    return torch.compile(formula, dynamic=False, fullgraph=True)


def prior_art(operator: Operator) -> ModuleType | None:
    """prior_art.py of the operator's folder, if it has one."""
    folder = operator.oracle.__module__.rpartition(".")[0]
    if importlib.util.find_spec(f"{folder}.prior_art") is None:
        return None
    return importlib.import_module(f"{folder}.prior_art")


def peer_variant(peer: Peer, told: Mapping[str, Any]) -> Variant:
    """A peer's function for these scalars and arguments, or why there is none."""
    try:
        known = version(peer.distribution)
        return Variant(peer.name, known, peer.make(told), ours=peer.ours)
    except (PackageNotFoundError, ImportError):
        return Variant(peer.name, "", None, "not installed", ours=peer.ours)
    except (BackendError, PlatformError) as error:
        return Variant(peer.name, "", None, str(error), ours=peer.ours)
