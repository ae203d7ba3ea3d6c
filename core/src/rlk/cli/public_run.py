# SPDX-License-Identifier: Apache-2.0
"""One call of an operator as users make it: the function that its package exports."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rlk import registry
from rlk.gates.inputs import Fixture
from rlk.launch import trace
from rlk.operator import Operator
from rlk.parts import cut_like, tensors_in


@dataclass(frozen=True)
class Results:
    """Outputs and gradients by name (y, dx, dweight ...), and the backends that ran."""

    tensors: dict[str, torch.Tensor]
    backends: set[str]


def run(
    operator: Operator,
    batch: Fixture,
    device: torch.device,
    backend: str,
    arguments: Mapping[str, Any],
    *,
    grad: bool,
) -> Results:
    """Call an operator with the defaults of its scalars, backward included where asked."""
    function = registry.public_function(operator)
    leaves = {
        t.name: batch.inputs[t.name].to(device).requires_grad_(grad and t.gradient is not None)
        for t in operator.inputs
    }
    with trace() as launches, torch.set_grad_enabled(grad):
        outputs = tensors_in(function(**leaves, **arguments, backend=backend))
        whole = outputs if len(outputs) == len(operator.outputs) else (torch.cat(outputs, -1),)
        tensors = dict(zip((t.name for t in operator.outputs), whole, strict=True))
        if grad:
            wanted = [leaves[t.name] for t in operator.differentiable]
            upstream = [batch.upstream[t.name].to(device) for t in operator.outputs]
            gradients = torch.autograd.grad(outputs, wanted, cut_like(upstream, outputs))
            names = [f"d{t.name}" for t in operator.differentiable]
            tensors |= zip(names, gradients, strict=True)
    return Results(
        {name: tensor.detach() for name, tensor in tensors.items()},
        {launch.backend for launch in launches},
    )
