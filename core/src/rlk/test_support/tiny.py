# SPDX-License-Identifier: Apache-2.0
"""An operator small enough to check by hand: one row input, one parameter, one saved tensor."""

import threading
from types import SimpleNamespace
from typing import Any

import torch

from rlk.launch import record
from rlk.operator import FLOATS, Backend, Operator, Reduction, Scalar, Tensor
from rlk.reduce import exact_sum


def tiny_operator(name: str, *, results: int = 1, chain: bool = False, **changes: Any) -> Operator:
    """The declaration.

        y = x * peak * weight * factor,  peak = max(|x|), a constant to gradients

    Args:
        name: what torch will know it by; a name can be published once per process.
        results: 2 adds z = x * factor.
        chain: the gradient of weight is a chain over rows.
        changes: fields of the declaration to replace.
    """
    row = ("...", "N")
    declared = (Tensor("y", row, ("=x",)), Tensor("z", row, ("=x",)))
    golden = tiny_backend(results=results, chain=chain)
    gradient: Any = "chain" if chain else "parameter"
    fields: dict[str, Any] = {
        "name": name,
        "package": "none",
        "bits_version": 1,
        "inputs": (
            Tensor("x", row, FLOATS, gradient="row"),
            Tensor("weight", ("N",), ("=x", "float32"), gradient=gradient),
        ),
        "scalars": (Scalar("factor", 1.0, minimum=0.0),),
        "outputs": declared[:results],
        "saved": (Tensor("peak", ("...",), ("float32",)),),
        "reductions": (Reduction("dweight", "mma_chain" if chain else "exact_sum", "T"),),
        "category": "elementwise",
        "claims": (),
        "workloads": (),
        "oracle": lambda: None,
        "backends": (Backend("golden", lambda: golden, ("cpu",), on_request=("nvidia",)),),
        "formula": "y = x * peak * weight * factor",
    }
    return Operator(**{**fields, **changes})


def tiny_backend(label: str = "golden", results: int = 1, chain: bool = False) -> Any:
    """A backend module that reports its launches as `label`.

    Its `needs` and `threads` list what each backward call was asked for, and where it ran.
    """
    module = SimpleNamespace(needs=[], threads=[])

    def forward(
        x: torch.Tensor, weight: torch.Tensor, *, factor: float
    ) -> tuple[torch.Tensor, ...]:
        record(label, "tiny_forward", "")
        rows = x.float()
        peak = rows.abs().amax(1)
        y = rows * peak[:, None] * weight.float() * factor
        return *(y.to(x.dtype), (rows * factor).to(x.dtype))[:results], peak

    def backward(
        *arguments: torch.Tensor,
        factor: float,
        needs: frozenset[str],
        initial: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        record(label, "tiny_backward", "")
        module.needs.append(needs)
        module.threads.append(threading.current_thread())
        *gradients, x, weight, peak = arguments
        scaled = gradients[0].float() * peak[:, None] * factor
        dx = state = None
        if "x" in needs:
            dx = scaled * weight.float()
            for other in gradients[1:]:
                dx = dx + other.float() * factor
            dx = dx.to(x.dtype)
        if "weight" in needs:
            empty = exact_sum.new(x.shape[1], x.device)
            terms = scaled * x.float()
            state = exact_sum.add_rows(empty, terms, backend="golden")
            if chain:
                dtype = weight.dtype if initial is None else torch.float32
                state = ascending(terms, initial).to(dtype)
        return dx, state

    module.forward, module.backward = forward, backward
    return module


def ascending(terms: torch.Tensor, initial: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of rows [T, N] in FP32, one after another."""
    total = torch.zeros_like(terms[0]) if initial is None else initial
    for term in terms:
        total = total + term
    return total


def small_integers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Integers of -4 to 4, whose sums and products every dtype of an operator holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)
