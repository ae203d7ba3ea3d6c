# SPDX-License-Identifier: Apache-2.0
"""What the looks of a call decide, found out once: checks, backend, shapes, strides.

Checks read no element of a tensor, so calls that look alike pass or fail alike. The first one is
checked in full and leaves a plan, a function of the tensors and scalars; the others run it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

# (tensors, checked scalars in the order of the declaration) -> results.
Plan = Callable[[Sequence[torch.Tensor], Sequence[Any]], tuple[Any, ...]]

# 1024 plans of about 2 KB: every shape of a training run, but not of a server's whole life.
MOST_PLANS = 1024

_generation = 0


class Plans:
    """The plans of one operator in one direction."""

    def __init__(self) -> None:
        self._plans: dict[Any, Plan] = {}

    def find(self, key: Any) -> Plan | None:
        """The plan kept under a key, if there is one."""
        return self._plans.get(key)

    def keep(self, key: Any, plan: Plan) -> None:
        """Keep a plan; at the limit all others go, as most are of sizes that never return."""
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        self._plans[key] = plan


def looks(tensors: Sequence[torch.Tensor], *request: Any) -> Any:
    """All that checks and plans may read of a call; None for tensors that have no strides."""
    seen: list[Any] = [_generation, request]
    try:
        for t in tensors:
            seen += (t.shape, t.stride(), t.dtype, t.device, t.layout, t.is_neg(), t.requires_grad)
    except RuntimeError:
        # Compressed and nested layouts, which the checks refuse by name.
        return None
    return tuple(seen)


def forget_plans() -> None:
    """Plan afresh from now on, as after a change of backends or a fork."""
    global _generation
    _generation += 1
