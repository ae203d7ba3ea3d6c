# SPDX-License-Identifier: Apache-2.0
"""Other libraries' functions of the same formula: those of the base with an offset of 1."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rlk.bench.variants import Peer

from ..rms_norm import prior_art as base


def _offset_by_one(peer: Peer) -> Peer:
    def make(scalars: Mapping[str, Any]) -> Callable[..., Any]:
        return peer.make({**scalars, "weight_offset": 1.0})

    return replace(peer, make=make)


PEERS = tuple(map(_offset_by_one, base.PEERS))
