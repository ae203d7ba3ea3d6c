# SPDX-License-Identifier: Apache-2.0
"""The leaf that takes the exact state of a parameter's gradient, and the state in it."""

from collections.abc import Sequence

import torch

from rlk.arguments import dtype_name
from rlk.errors import ArgumentError
from rlk.reduce import exact_sum
from rlk.reduce.exact_sum import STATE_ROWS


def new_carrier(parameter: torch.Tensor) -> torch.Tensor:
    """A carrier for the gradient of `parameter`, to be handed to a call as `weight_sum` or alike.

    In that call the parameter's gradient is zeros, and the carrier's is the exact state of the
    sum. It adds up in `.grad` over any calls: up to 2^20 of them without rounding.

    Args:
        parameter: whose gradient an operator forms as an exact sum.
    Returns:
        carrier: [13, ...] before the axes of the parameter, FP64 zeros on its device, a leaf that
            requires a gradient.
    Raises:
        ArgumentError: parameter is no tensor.
    """
    if not isinstance(parameter, torch.Tensor):
        raise ArgumentError(
            f"new_carrier: parameter must be a tensor, got {type(parameter).__name__}"
        )
    shape = (STATE_ROWS, *parameter.shape)
    zeros = torch.zeros(shape, dtype=torch.float64, device=parameter.device)
    return zeros.requires_grad_()


class SumCarrier:
    """The carrier of a parameter over the blocks of an accumulator."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.leaf = new_carrier(parameter)

    @property
    def handed(self) -> torch.Tensor:
        """What a module hands to its operator."""
        return self.leaf

    def fits(self, parameter: torch.Tensor) -> bool:
        """Whether it may serve a parameter again."""
        shape = (STATE_ROWS, *parameter.shape)
        return (self.leaf.shape, self.leaf.device) == (shape, parameter.device)

    def clear(self) -> None:
        """Begin anew, in the same memory, to which a CUDA graph may add."""
        if self.leaf.grad is None:
            self.leaf.grad = torch.zeros_like(self.leaf)
        self.leaf.grad.zero_()

    def state(self) -> dict[str, torch.Tensor]:
        """What it has taken, by the endings of names."""
        return {"": state_of(self.leaf).view(self.leaf.shape)}

    def load(self, state: torch.Tensor) -> None:
        """Go on from what `state` gave, or several of them added."""
        assert self.leaf.grad is not None  # noqa: S101 - the block was entered
        whole = normalised(state.to(self.leaf.device).reshape(STATE_ROWS, -1))
        self.leaf.grad.copy_(whole.view(self.leaf.shape))


def state_of(carrier: torch.Tensor) -> torch.Tensor:
    """The exact state that a carrier has taken.

    Args:
        carrier: as `new_carrier` makes it; without a gradient it holds an empty sum.
    Returns:
        state: [13, C], int64, normalised, as `rlk.reduce.exact_sum` takes it; C are all elements
            of the parameter. States of other micro-batches and ranks may be added to it.
    Raises:
        ArgumentError: carrier is none.
    """
    shape = list(carrier.shape) if isinstance(carrier, torch.Tensor) else []
    if shape[:1] != [STATE_ROWS] or carrier.dtype != torch.float64:
        got = f"{dtype_name(carrier.dtype)} {shape}" if shape else type(carrier).__name__
        raise ArgumentError(
            f"state_of: carrier must be float64 [{STATE_ROWS}, ...], as new_carrier makes it, "
            f"got {got}"
        )
    return states_of([carrier])


def states_of(carriers: Sequence[torch.Tensor]) -> torch.Tensor:
    """The states of several carriers on one device, side by side: one launch, not one for each."""
    taken = [c.detach() if c.grad is None else c.grad.detach() for c in carriers]
    return normalised(torch.cat([t.reshape(STATE_ROWS, -1) for t in taken], 1).long())


def normalised(state: torch.Tensor) -> torch.Tensor:
    """The same sums with digits that add exactly in FP64, and equal bytes for equal sums."""
    return exact_sum.merge(state, torch.zeros_like(state))
