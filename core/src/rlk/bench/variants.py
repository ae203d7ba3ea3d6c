# SPDX-License-Identifier: Apache-2.0
"""Who takes part: our backends, the operator's formula in PyTorch, and other libraries.

An operator's folder may hold prior_art.py with PEERS, a tuple of `Peer`; CONVENTIONS, others that
round in other places: they are surveyed and counted, and not timed; and COMPILED, what a user would
give to torch.compile, made as a peer is, where that is not the formula in FP32.
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
from rlk.records.document import Verdict

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

    def version(self) -> str | None:
        """That of its library, or None where it is absent."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None

    def missing(self) -> str | None:
        """What the machine lacks for it, in one clause, or None."""
        if self.version() is None:
            return f"it needs the package {self.distribution}, which is not installed"
        return None


@dataclass(frozen=True)
class Variant:
    """A function to be measured, or why there is none."""

    name: str
    version: str
    call: Call | None
    missing: str | None = None
    ours: bool = False
    verdict: Verdict = "measured"


def variants(
    operator: Operator,
    scalars: Mapping[str, Any],
    arguments: Mapping[str, Any],
    refused: Mapping[str, tuple[Verdict, str]] | None = None,
) -> list[Variant]:
    """Our backends first, then PyTorch and the peers; `arguments` are those of the workload.

    `refused` says of some names why they are not measured: they are not even made.
    """
    told = {**scalars, **arguments}
    refused = refused or {}
    found = []
    for name in OURS:
        found.append(_refused(name, refused, True) or _ours(operator, name, told))
    compiled = compiled_peer(operator)
    for peer in (compiled, *_peers(operator)):
        said = scalars if peer is compiled else told
        found.append(_refused(peer.name, refused, peer.ours) or _peer(peer, said))
    return found


def timed_peers(operator: Operator) -> tuple[Peer, ...]:
    """Other libraries' functions that are measured beside ours, PyTorch's compiler among them."""
    others = tuple(peer for peer in _peers(operator) if not peer.ours)
    return compiled_peer(operator, dynamic=True), *others


def peers_of(operator: Operator) -> tuple[Peer, ...]:
    """Those, and other libraries' functions that round in other places; each name once."""
    found: dict[str, Peer] = {}
    for peer in (*timed_peers(operator), *conventions(operator)):
        found.setdefault(peer.name, peer)
    return tuple(found.values())


def _refused(name: str, refused: Mapping[str, tuple[Verdict, str]], ours: bool) -> Variant | None:
    # Two calls of a backend are that backend.
    verdict = refused.get(name) or (refused.get(name.partition(",")[0]) if ours else None)
    return Variant(name, "", None, verdict[1], ours, verdict[0]) if verdict else None


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
        return Variant(backend, "", None, str(error), True, "not applicable")


def compiled_peer(operator: Operator, dynamic: bool = False) -> Peer:
    """What PyTorch's compiler makes of the operator: of its folder's COMPILED, or of its formula.

    `dynamic` compiles once for all sizes, otherwise once for each. Of a sum that is an output too
    the formula norms what FP32 has, and its name says so.
    """
    own = getattr(prior_art(operator), "COMPILED", None)

    def make(scalars: Mapping[str, Any]) -> Call:
        call = _formula(operator, scalars) if own is None else own(scalars)
        torch._dynamo.reset()
        return torch.compile(call, dynamic=dynamic, fullgraph=True)

    summed = own is None and any(output.sum_of for output in operator.outputs)
    return Peer("torch.compile, sum unrounded" if summed else "torch.compile", "torch", make)


def _formula(operator: Operator, scalars: Mapping[str, Any]) -> Call:
    """The textbook formula in FP32, rounded once at the end."""
    told = {s.name: scalars.get(s.name, s.default) for s in operator.scalars}

    def formula(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = operator.oracle(*(t.float() for t in tensors), **told)
        return tuple(t.to(tensors[0].dtype) for t in results[: len(operator.outputs)])

    return formula


def prior_art(operator: Operator) -> ModuleType | None:
    """prior_art.py of the operator's folder, if it has one."""
    folder = operator.oracle.__module__.rpartition(".")[0]
    if importlib.util.find_spec(f"{folder}.prior_art") is None:
        return None
    return importlib.import_module(f"{folder}.prior_art")


def conventions(operator: Operator) -> tuple[Peer, ...]:
    """Other libraries' functions that round in other places."""
    return getattr(prior_art(operator), "CONVENTIONS", ())


def _peers(operator: Operator) -> tuple[Peer, ...]:
    return getattr(prior_art(operator), "PEERS", ())


def _peer(peer: Peer, told: Mapping[str, Any]) -> Variant:
    known = peer.version()
    if known is None:
        return Variant(peer.name, "", None, "not installed", peer.ours, "not applicable")
    try:
        return Variant(peer.name, known, peer.make(told), ours=peer.ours)
    except (BackendError, PlatformError) as error:
        return Variant(peer.name, "", None, str(error), peer.ours, "not applicable")
    except Exception as error:
        if peer.ours:
            raise
        return Variant(peer.name, known, None, one_line(error), peer.ours, "failed")


def one_line(error: Exception) -> str:
    """What failed, as a record says it."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
