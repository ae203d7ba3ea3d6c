# SPDX-License-Identifier: Apache-2.0
"""Rollout engines whose bits an operator claims: what they computed, or they themselves.

An operator that claims `rollout_equal` holds rollout.py beside its oracle, with an `Engine` as
ENGINE.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rlk.operator import Operator

# The operator's inputs to its outputs, in the order of both declarations.
EngineCall = Callable[..., tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Recorded:
    """What an engine made of one input: SHA-256 of the bytes of each output, by our names."""

    sizes: Mapping[str, int]
    digests: Mapping[str, str]


@dataclass(frozen=True)
class Engine:
    """An engine, by version.

    `inputs` makes the operator's inputs from sizes, the same on every machine. `load` returns the
    version of the installed engine and its function, or raises ImportError where there is none.
    """

    name: str
    version: str
    dtype: str
    recorded: Sequence[Recorded]
    inputs: Callable[[Mapping[str, int]], Sequence[torch.Tensor]]
    load: Callable[[], tuple[str, EngineCall]]


def engine_of(operator: Operator) -> Engine:
    """The engine with which an operator claims equal bits."""
    folder = operator.oracle.__module__.rpartition(".")[0]
    engine: Engine = importlib.import_module(f"{folder}.rollout").ENGINE
    return engine
