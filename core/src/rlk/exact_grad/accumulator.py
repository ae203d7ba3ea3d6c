# SPDX-License-Identifier: Apache-2.0
"""Gradients summed exactly over micro-batches and ranks, and rounded once."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlk.carried import is_dtensor
from rlk.errors import ArgumentError, GradientError
from rlk.reduce import exact_sum
from rlk.reduce.exact_sum import STATE_ROWS, check_divisor

from .carrier import new_carrier, normalised, state_of, states_of
from .parameters import AccumulationReport, Found, ParameterGradient, exact, find

_NAME = "ExactGradAccumulator"


@dataclass(frozen=True)
class _Sum:
    """A parameter of this block, and its carrier."""

    found: Found
    carrier: torch.Tensor

    def attach(self) -> None:
        """Let the modules hand the carrier to their operators."""
        for module, attribute in self.found.places:
            setattr(module, attribute, self.carrier)

    def detach(self) -> None:
        """Let the modules hand none: that is what their class says."""
        for module, attribute in self.found.places:
            vars(module).pop(attribute, None)


class ExactGradAccumulator:
    """A block in which parameter gradients add up exactly; leaving it rounds them once.

        with ExactGradAccumulator(model):
            for micro_batch in step:
                loss(model, micro_batch).backward()
        optimizer.step()

    The gradient of each parameter that `report` calls exact is RN(sum over all rows of all calls
    on all ranks): its bits do not depend on micro-batches, ranks or order. Until the end its
    `.grad` takes zeros from each call; what is found there then, from before the block or from
    code that is not ours, is added to the rounded sum once, as PyTorch adds. Other parameters
    accumulate as always. One object may serve any number of blocks, one after another, and keeps
    its memory, as CUDA graphs need.

    Args:
        module: the model, wrapped by DDP or fully_shard or not, whose modules say which of their
            parameters have exact gradients, as ours do.
        process_group: whose ranks' sums are added; None is the default group, where
            torch.distributed is initialised. Every rank of it must leave the block.
        main_grad: write FP32 to `main_grad` and leave `.grad` None, instead of writing `.grad` in
            the dtype of the parameter.
    Raises:
        ArgumentError: module is no torch.nn.Module.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        main_grad: bool = False,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise ArgumentError(
                f"{_NAME}: module must be a torch.nn.Module, got {type(module).__name__}"
            )
        self._module = module
        self._group = process_group
        self._main_grad = main_grad
        self._carriers: dict[str, torch.Tensor] = {}
        self._sums: list[_Sum] | None = None  # of the block that is open

    def __enter__(self) -> "ExactGradAccumulator":
        """Begin with empty sums."""
        sums = [_Sum(found, self._carrier(found)) for found in exact(self._module)]
        for each in sums:
            for module, attribute in each.found.places:
                if vars(module).get(attribute) is not None:
                    raise GradientError(
                        f"{_NAME}: the module must be in one block at a time, got "
                        f"{each.found.name} in a block already"
                    )
        for each in sums:
            if each.carrier.grad is None:
                each.carrier.grad = torch.zeros_like(each.carrier)
            # In place: a CUDA graph adds to this memory.
            each.carrier.grad.zero_()
            each.attach()
        self._sums = sums
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish, unless that was done or something was raised."""
        try:
            if kind is None and self._sums is not None:
                self.finalize()
        finally:
            self._close()

    def finalize(self, divide_by: int = 1) -> None:
        """Add the sums of all ranks, round each once and write the gradients; ends the block.

            gradient = RN(sum / divide_by)

        Args:
            divide_by: a whole number, the same on all ranks, such as the tokens of the step. The
                exact quotient is rounded, so it is not the same as dividing the gradient.
        Raises:
            ArgumentError: divide_by is no int from 1 to 2^47 - 1.
            GradientError: no block is open, or it was finished before.
        """
        check_divisor(f"{_NAME}.finalize", divide_by)
        sums = self._open("finalize")
        by_device: dict[torch.device, list[_Sum]] = defaultdict(list)
        for each in sums:
            by_device[each.carrier.device].append(each)
        with torch.no_grad():
            for group in by_device.values():
                # Side by side: one reduction and few launches for all of them.
                states = self._reduced(states_of([s.carrier for s in group]))
                self._write(group, states, divide_by)
        self._close()

    def report(self) -> AccumulationReport:
        """Every parameter: exact, or ordinary with the reason.

        Returns:
            report: as the module is now; prints as a table.
        """
        return AccumulationReport(
            tuple(ParameterGradient(f.name, f.reason) for f in find(self._module))
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What this rank has summed so far in the open block.

        Returns:
            states: by the name of the parameter: int64 [13, ...], to be loaded in a later block on
                as many ranks, or, added elementwise to those of other ranks, on fewer.
        Raises:
            GradientError: no block is open.
        """
        return {
            s.found.name: state_of(s.carrier).view(s.carrier.shape)
            for s in self._open("state_dict")
        }

    def load_state_dict(self, states: Mapping[str, torch.Tensor]) -> None:
        """Go on in the open block from these sums, instead of what it has summed so far.

        Args:
            states: as from `state_dict`, or several added elementwise.
        Raises:
            ArgumentError: names, shapes or dtypes are others.
            GradientError: no block is open.
        """
        sums = {s.found.name: s.carrier for s in self._open("load_state_dict")}
        if states.keys() != sums.keys():
            other = sorted(states.keys() ^ sums.keys())
            raise ArgumentError(
                f"{_NAME}.load_state_dict: states must name the exact parameters, got {other[0]} "
                "on one side alone"
            )
        for name, carrier in sums.items():
            state = states[name]
            if state.dtype != torch.int64 or state.shape != carrier.shape:
                raise ArgumentError(
                    f"{_NAME}.load_state_dict: {name} must be int64 {list(carrier.shape)}, got "
                    f"{state.dtype} {list(state.shape)}"
                )
        for name, carrier in sums.items():
            state = states[name].to(carrier.device).reshape(STATE_ROWS, -1)
            assert carrier.grad is not None  # noqa: S101 - the block was entered
            carrier.grad.copy_(normalised(state).view(carrier.shape))

    def _carrier(self, found: Found) -> torch.Tensor:
        """That of the last block, if it fits."""
        kept = self._carriers.get(found.name)
        shape, device = (STATE_ROWS, *found.parameter.shape), found.parameter.device
        if kept is None or kept.shape != shape or kept.device != device:
            kept = self._carriers[found.name] = new_carrier(found.parameter)
            kept.register_hook(self._require_open)
        return kept

    def _require_open(self, gradient: torch.Tensor) -> None:
        if self._sums is None:
            raise GradientError(
                f"{_NAME}: backward must run inside the block of its forward, got one after it"
            )

    def _open(self, name: str) -> list[_Sum]:
        if self._sums is None:
            raise GradientError(
                f"{_NAME}.{name}: the block must be open, got none or one that is finished"
            )
        return self._sums

    def _close(self) -> None:
        for each in self._sums or ():
            each.detach()
        self._sums = None

    def _reduced(self, states: torch.Tensor) -> torch.Tensor:
        if self._group is not None or (dist.is_available() and dist.is_initialized()):
            dist.all_reduce(states, group=self._group)
        return states

    def _write(self, sums: list[_Sum], states: torch.Tensor, divide_by: int) -> None:
        """Round states that lie side by side, and hand each parameter its own."""
        widths = [s.found.parameter.numel() for s in sums]
        rounded: dict[torch.dtype, tuple[torch.Tensor, ...]] = {}
        for place, each in enumerate(sums):
            parameter = each.found.parameter
            dtype = torch.float32 if self._main_grad else parameter.dtype
            if dtype not in rounded:
                # All columns, for each dtype there is: most models have one.
                whole = exact_sum.round(states, dtype, divide_by=divide_by)
                rounded[dtype] = whole.split(widths)
            gradient = rounded[dtype][place].view(parameter.shape)
            _hand_over(parameter, gradient, self._main_grad)


def _hand_over(parameter: Any, gradient: torch.Tensor, main_grad: bool) -> None:
    """Write a gradient that all ranks have whole, placed as its parameter is, in place."""
    if is_dtensor(parameter):
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = parameter.device_mesh, parameter.placements
        gradient = distribute_tensor(gradient, mesh, placements, src_data_rank=None)
    there = parameter.grad
    if there is not None:
        mine, theirs = _local(gradient), _local(there).to(gradient.dtype)
        # A selection: +0 would take the sign of -0.
        mine.copy_(torch.where(theirs == 0, mine, theirs + mine))
    name = "main_grad" if main_grad else "grad"
    kept = getattr(parameter, name, None)
    if kept is None:
        setattr(parameter, name, gradient.clone())  # not a view of all gradients
    else:
        _local(kept).copy_(_local(gradient))
    if main_grad:
        parameter.grad = None


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor
