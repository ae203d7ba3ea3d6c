# SPDX-License-Identifier: Apache-2.0
"""A gradient that is a chain over rows, carried on from call to call instead of finished in each.

The chain of a weight matrix adds its rows in steps of 16, of FP32 32. It may be stored between two
steps: micro-batches of whole steps, one after another, leave the bits of one batch. It has no
parts that another rank could add: ranks add what their chains came to.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rlk.carried import CALLS
from rlk.errors import GradientError


class ChainCarrier:
    """The chain so far, and what its calls were: two leaves for `rlk.carried`."""

    def __init__(self, parameter: torch.Tensor) -> None:
        device = parameter.device
        self.leaf = torch.zeros(parameter.shape, device=device, dtype=torch.float32)
        self.calls = torch.zeros(CALLS, device=device, dtype=torch.float64)
        # How many calls came behind rows that filled no step, and how many graphs held several
        # calls. On the device: a look at it would wait for every backward.
        self.faults = torch.zeros(2, device=device, dtype=torch.float64)
        self.leaf.requires_grad_().register_post_accumulate_grad_hook(self._go_on)
        self.calls.requires_grad_().register_hook(self._watch)

    @property
    def handed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What a module hands to its operator."""
        return self.leaf, self.calls

    def fits(self, parameter: torch.Tensor) -> bool:
        """Whether it may serve a parameter again."""
        return (self.leaf.shape, self.leaf.device) == (parameter.shape, parameter.device)

    def clear(self) -> None:
        """Begin anew, in the same memory, to which a CUDA graph may write."""
        if self.calls.grad is None:
            self.calls.grad = torch.zeros_like(self.calls)
        for tensor in (self.leaf.data, self.calls.grad, self.faults):
            tensor.zero_()
        self.leaf.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """All of it, by the endings of names."""
        assert self.calls.grad is not None  # noqa: S101 - the block was entered
        calls = torch.cat([self.calls.grad, self.faults])
        return {"": self.leaf.detach().clone(), ".calls": calls}

    def load(self, value: torch.Tensor, calls: torch.Tensor) -> None:
        """Go on from what `state` gave."""
        assert self.calls.grad is not None  # noqa: S101 - the block was entered
        self.leaf.data.copy_(value)
        self.calls.grad.copy_(calls[:CALLS])
        self.faults.copy_(calls[CALLS:])

    @torch.no_grad()
    def _go_on(self, value: torch.Tensor) -> None:
        # The gradient is the chain itself. `data`: graphs of later calls may hold the leaf already,
        # and are meant to read what it is by then.
        assert value.grad is not None  # noqa: S101 - that is when torch calls
        value.data.copy_(value.grad)
        value.grad = None

    @torch.no_grad()
    def _watch(self, calls: torch.Tensor) -> None:
        assert self.calls.grad is not None  # noqa: S101 - the block was entered
        rows, count, _ = calls
        self.faults[0] += (self.calls.grad[2] > 0) & (rows > 0)
        self.faults[1] += count > 1


def refuse_faults(
    name: str, named: Sequence[tuple[str, ChainCarrier]], group: Any, ranks: int
) -> None:
    """Raise on all ranks if any of them has a chain that is no longer that of one batch.

    Raises:
        GradientError: a micro-batch before the last did not end with a step, or a graph held
            several calls, whose chains autograd added.
    """
    if not named:
        return
    device = named[0][1].faults.device
    faults = torch.stack([carrier.faults.to(device) for _, carrier in named])
    if ranks > 1:
        dist.all_reduce(faults, op=dist.ReduceOp.MAX, group=group)
    for (parameter, _), (ragged, several) in zip(named, faults.tolist(), strict=True):
        if several:
            raise GradientError(
                f"{name}: a continued chain must have one call in a graph, got several of "
                f"{parameter}; leave continue_chains False"
            )
        if ragged:
            raise GradientError(
                f"{name}: every micro-batch but the last must have a multiple of 16 samples, of "
                f"FP32 32, for a continued chain, got another for {parameter}; leave "
                "continue_chains False"
            )


def add_ranks(value: torch.Tensor, group: Any, ranks: int) -> torch.Tensor:
    """FP32 sums over ranks, in their order: the same bytes on each of them and in every run."""
    if ranks == 1:
        return value
    padding = -value.numel() % ranks
    mine = torch.nn.functional.pad(value.reshape(-1), (0, padding))
    # Each rank gets one part of all ranks' chains, adds them, and hands the sum to all.
    parts = torch.empty_like(mine)
    dist.all_to_all_single(parts, mine, group=group)
    first, *others = parts.view(ranks, -1)
    total = first.clone()
    for other in others:
        total += other
    dist.all_gather_into_tensor(mine, total, group=group)
    return mine[: value.numel()].view_as(value)
