# SPDX-License-Identifier: Apache-2.0
"""What one launch for query and key competes with: two calls, and Liger, which has one too."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rlk.bench.variants import OURS, Peer, public_call
from rlk.errors import BackendError

from ..multi_axis_rope import prior_art as one
from ..multi_axis_rope.operator import OPERATOR as ONE

Make = Callable[[Mapping[str, Any]], Callable[..., Any]]


def two_calls(told: Mapping[str, Any], make: Make) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A function of one tensor, called on query and on key."""
    turn = make(told)

    def call(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return turn(q, cos, sin), turn(k, cos, sin)

    return call


def twice(peer: Peer) -> Peer:
    """The peer of one tensor, called on both."""
    return replace(peer, name=f"{peer.name}, twice", make=partial(two_calls, make=peer.make))


def own(backend: str) -> Peer:
    """Our operator of one tensor, called on both."""
    make = partial(public_call, ONE, backend)
    return Peer(f"{backend}, two calls", "rlk-rope", partial(two_calls, make=make), ours=True)


def in_liger(told: Mapping[str, Any]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Liger's rotation of half-split pairs. It overwrites its inputs, and dy, if contiguous."""
    if told["interleaved"]:
        raise BackendError("it turns half-split pairs alone")
    from liger_kernel.ops.rope import LigerRopeFunction

    def call(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        heads_first = [t.transpose(1, 2) for t in (q, k)]
        # Its argument unsqueeze_dim is for tables of four axes.
        turned = LigerRopeFunction.apply(*heads_first, cos, sin, None, 1, 2 * cos.shape[-1])
        return tuple(t.transpose(1, 2) for t in turned)

    return call


LIGER = Peer("Liger, in place", "liger-kernel", in_liger)
PEERS = (*map(own, OURS), *map(twice, one.PEERS), LIGER)
