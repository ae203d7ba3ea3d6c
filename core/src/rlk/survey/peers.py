# SPDX-License-Identifier: Apache-2.0
"""Another library's function as a backend: what runs, and is judged, are its own gradients."""

import functools
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch

from rlk.bench.variants import Call, Peer, peers_of
from rlk.errors import BackendError, one_of
from rlk.launch import record
from rlk.operator import Backend, Operator
from rlk.parts import cut_like, tensors_in
from rlk.reduce import exact_sum

# What another library can be held to: nobody else promises our bits.
JUDGMENTS = (
    "forward_accuracy",
    "gradient_accuracy",
    "forward_invariance",
    "gradient_invariance",
    "repeatable",
    "order_free",
)


def held_to(operator: Operator, name: str) -> Operator:
    """The operator with another library's function as its only backend.

    It has no saved state that anybody could compare, and no claims but those on values, on rows
    and on the order of parameter gradients. The exact state of a parameter's gradient is that of
    the one number that the library returned: where calls are added up, it adds what was rounded.
    Backward gets every input and returns a gradient for each: no output stands for others.

    Args:
        operator: the declaration.
        name: of a peer.
    Returns:
        A declaration that gates can judge.
    Raises:
        BackendError: no peer of the operator has this name.
    """
    peers = {peer.name: peer for peer in peers_of(operator)}
    if name not in peers:
        names = one_of([*(b.name for b in operator.backends), *peers])
        raise BackendError(f"{operator.name}: backend must be {names}, got {name!r}")
    saved = {t.name for t in operator.saved}
    claims = tuple(
        replace(claim, tensors=tuple(t for t in claim.tensors if t not in saved))
        for claim in operator.claims
        if claim.word in ("repeatable", "batch_invariant", "order_free")
    )

    @functools.wraps(operator.oracle)
    def oracle(*tensors: torch.Tensor, **options: Any) -> Any:
        return operator.oracle(*tensors, **options)[: len(operator.outputs)]

    return replace(
        operator,
        outputs=tuple(replace(t, sum_of=()) for t in operator.outputs),
        saved=(),
        claims=claims,
        oracle=oracle,
        linear=False,
        backends=(backend(operator, peers[name]),),
    )


def backend(operator: Operator, peer: Peer) -> Backend:
    """The row of a peer: it runs wherever its library does."""

    def missing(platform: str) -> str | None:
        return peer.missing()

    def load() -> ModuleType:
        # A module is what a declaration loads; gates use its two functions alone.
        return cast(ModuleType, module(operator, peer))

    return Backend(peer.name, load, ("cpu", "nvidia"), missing=missing, ours=False)


def module(operator: Operator, peer: Peer) -> SimpleNamespace:
    """`forward` and `backward` of a backend, by the peer's function and autograd through it."""
    version = peer.version() or ""
    made: dict[tuple[Any, ...], Call] = {}

    def run(tensors: tuple[torch.Tensor, ...], told: dict[str, Any]) -> list[torch.Tensor]:
        key = tuple(sorted(told.items()))
        if key not in made:
            made[key] = peer.make(told)
        outputs = tensors_in(made[key](*tensors))
        whole = len(outputs) == len(operator.outputs)
        return list(outputs) if whole else [torch.cat(outputs, -1)]

    def forward(*tensors: torch.Tensor, **told: Any) -> tuple[torch.Tensor, ...]:
        record(peer.name, f"{peer.name} forward", version)
        with torch.no_grad():
            return tuple(t.contiguous() for t in run(tensors, told))

    def backward(*given: torch.Tensor, needs: frozenset[str], **told: Any) -> tuple[Any, ...]:
        record(peer.name, f"{peer.name} backward", version)
        upstream, inputs = operator.split_backward(given)
        leaves = [
            t.detach().requires_grad_(declared.name in needs)
            for declared, t in zip(operator.inputs, inputs, strict=True)
        ]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        with torch.enable_grad():
            outputs = run(tuple(leaves), told)
            if not all(output.requires_grad for output in outputs):
                raise BackendError(f"{peer.name} has a forward alone")
            found = iter(torch.autograd.grad(outputs, wanted, cut_like(list(upstream), outputs)))
        return tuple(
            _finished(declared.gradient, next(found)) if declared.name in needs else None
            for declared in operator.differentiable
        )

    return SimpleNamespace(forward=forward, backward=backward)


def _finished(gradient: str | None, value: torch.Tensor) -> torch.Tensor:
    if gradient != "parameter":
        return value.contiguous()
    state = exact_sum.new(value.numel(), value.device)
    return exact_sum.add_rows(state, value.reshape(1, -1).float(), backend="golden")
