# SPDX-License-Identifier: Apache-2.0
"""Gradients summed exactly over micro-batches and ranks, and rounded once."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlk.arguments import dtype_name
from rlk.carried import is_dtensor
from rlk.errors import ArgumentError, GradientError
from rlk.reduce import exact_sum
from rlk.reduce.exact_sum import check_divisor

from .carrier import SumCarrier, states_of
from .chain import ChainCarrier, add_ranks, refuse_faults
from .parameters import AccumulationReport, Found, ParameterGradient, find, restrict

_NAME = "ExactGradAccumulator"


@dataclass(frozen=True)
class _Sum:
    """A parameter of this block, and its carrier."""

    found: Found
    carrier: SumCarrier | ChainCarrier

    def attach(self) -> None:
        """Let the modules hand the carrier to their operators."""
        for module, attribute in self.found.places:
            setattr(module, attribute, self.carrier.handed)

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
    accumulate as always, and their sum over ranks is the caller's. One object may serve any number
    of blocks, one after another, and keeps its memory, as CUDA graphs need.

    Args:
        module: the model, wrapped by DDP or fully_shard or not, whose modules say which of their
            parameters have exact gradients, as ours do. They hand the carriers of sums to
            operators, so parameters alone do not do.
        process_group: whose ranks' sums are added; None is the default group, where
            torch.distributed is initialised. Every rank of it must leave the block.
        main_grad: write FP32 to `main_grad` and leave `.grad` None, instead of writing `.grad` in
            the dtype of the parameter.
        parameters: those of module to be summed here, as one of several optimizers has them; all
            if None. The others accumulate as always.
        continue_chains: also continue gradients that are chains over rows from call to call, in
            FP32, rounded once. On one rank, with micro-batches of a multiple of 16 samples (of FP32
            32) but the last, they have the bits of one batch. Several ranks add in FP32, in their
            order. Takes 4 bytes an element, and as much again in backward, unsharded.
    Raises:
        ArgumentError: module is no torch.nn.Module, or has not all of parameters; or process_group
            is none that this rank is in.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        main_grad: bool = False,
        parameters: Iterable[torch.Tensor] | None = None,
        continue_chains: bool = False,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise ArgumentError(
                f"{_NAME}: module must be a torch.nn.Module, got {type(module).__name__}; hand "
                "over the module that holds the parameters, and a list of them as parameters="
            )
        # What new_group returns to a rank outside is an int.
        if process_group is not None and not hasattr(process_group, "group_name"):
            raise ArgumentError(
                f"{_NAME}: process_group must be a torch.distributed.ProcessGroup of this rank, "
                f"got {process_group!r}"
            )
        self._module = module
        self._group = process_group
        self._main_grad = main_grad
        self._parameters = None if parameters is None else list(parameters)
        self._continue_chains = continue_chains
        self._carriers: dict[str, SumCarrier | ChainCarrier] = {}
        self._sums: dict[str, _Sum] | None = None  # of the block that is open, by name
        self._find()

    def __enter__(self) -> "ExactGradAccumulator":
        """Begin with empty sums."""
        covered = [found for found in self._find() if found.guarantee != "ordinary"]
        sums = [_Sum(found, self._carrier(found)) for found in covered]
        for each in sums:
            for module, attribute in each.found.places:
                if vars(module).get(attribute) is not None:
                    raise GradientError(
                        f"{_NAME}: the module must be in one block at a time, got "
                        f"{each.found.name} in a block already"
                    )
        for each in sums:
            each.carrier.clear()
        # Behind all that may fail, as for memory: a carrier left in a module adds to nothing.
        for each in sums:
            each.attach()
        self._sums = {each.found.name: each for each in sums}
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

            gradient = RN(sum / divide_by); of a chain RN(RN(chain / divide_by)), in FP32 first

        Args:
            divide_by: a whole number, the same on all ranks, such as the tokens of the step. The
                exact quotient is rounded, so it is not the same as dividing the gradient.
        Raises:
            ArgumentError: divide_by is no int from 1 to 2^47 - 1.
            GradientError: no block is open, or it was finished before; or a module has another
                parameter than at its beginning; or a chain is not that of one batch, by its
                micro-batches or by several calls in a graph. Nothing is written.
        """
        check_divisor(f"{_NAME}.finalize", divide_by)
        sums = self._open("finalize")
        for each in sums:
            if each.found.is_replaced:
                raise GradientError(
                    f"{_NAME}: modules must keep their parameters up to the end of the block, got "
                    f"another one in the place of {each.found.name}; end the block before"
                )
        exact: dict[torch.device, list[tuple[Found, torch.Tensor]]] = defaultdict(list)
        chains: list[tuple[Found, ChainCarrier]] = []
        for each in sums:
            if isinstance(each.carrier, ChainCarrier):
                chains.append((each.found, each.carrier))
            else:
                leaf = each.carrier.leaf
                exact[leaf.device].append((each.found, leaf))
        with torch.no_grad():
            ranks = self._ranks()
            refuse_faults(_NAME, [(f.name, c) for f, c in chains], self._group, ranks)
            for group in exact.values():
                # Side by side: one reduction and few launches for all of them.
                states = self._reduced(states_of([leaf for _, leaf in group]))
                self._write([found for found, _ in group], states, divide_by)
            for found, chain in chains:
                total = add_ranks(chain.leaf.detach(), self._group, ranks)
                self._write_chain(found, total, divide_by)
        self._close()

    def report(self) -> AccumulationReport:
        """Every parameter: exact, a chain with what its bits depend on, or ordinary and why.

        Returns:
            report: as the module is now; prints as a table.
        """
        ranks = self._ranks()
        chain = "bits of one batch if all micro-batches but the last have a multiple of 16 samples"
        chain += ", of FP32 32"
        if ranks > 1:
            chain += f"; {ranks} ranks then add in FP32 in their order, so bits depend on how many"
        return AccumulationReport(
            tuple(
                ParameterGradient(
                    f.name, f.guarantee, chain if f.guarantee == "chain" else f.reason
                )
                for f in self._find()
            )
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What this rank has summed so far in the open block.

        Returns:
            states: by the name of the parameter: int64 [13, ...], to be loaded in a later block on
                as many ranks, or, added elementwise to those of other ranks, on fewer. A chain is
                FP32, with what its calls were under a name of its own, for the same rank alone.
        Raises:
            GradientError: no block is open.
        """
        return {
            s.found.name + ending: state
            for s in self._open("state_dict")
            for ending, state in s.carrier.state().items()
        }

    def load_state_dict(self, states: Mapping[str, torch.Tensor]) -> None:
        """Go on in the open block from these sums, instead of what it has summed so far.

        Args:
            states: as from `state_dict`, or several added elementwise.
        Raises:
            ArgumentError: states is no mapping of tensors, or names, shapes or dtypes are others.
            GradientError: no block is open.
        """
        sums = self._open("load_state_dict")
        present = self.state_dict()
        for state in states.values() if isinstance(states, Mapping) else [states]:
            if not isinstance(state, torch.Tensor):
                raise ArgumentError(
                    f"{_NAME}.load_state_dict: states must be tensors by name, got "
                    f"{type(state).__name__}"
                )
        if states.keys() != present.keys():
            other = sorted(states.keys() ^ present.keys())
            raise ArgumentError(
                f"{_NAME}.load_state_dict: states must name the exact parameters, got {other[0]} "
                "on one side alone"
            )
        for name, now in present.items():
            state = states[name]
            if state.dtype != now.dtype or state.shape != now.shape:
                raise ArgumentError(
                    f"{_NAME}.load_state_dict: {name} must be {dtype_name(now.dtype)} "
                    f"{list(now.shape)}, got {dtype_name(state.dtype)} {list(state.shape)}"
                )
        for each in sums:
            name = each.found.name
            each.carrier.load(*(states[name + ending] for ending in each.carrier.state()))

    def _find(self) -> list[Found]:
        """The parameters, as the module is now."""
        return restrict(find(self._module, self._continue_chains), self._parameters, _NAME)

    def _carrier(self, found: Found) -> SumCarrier | ChainCarrier:
        """That of the last block, if it fits."""
        kind = ChainCarrier if found.guarantee == "chain" else SumCarrier
        kept = self._carriers.get(found.name)
        if not isinstance(kept, kind) or not kept.fits(found.parameter):
            kept = self._carriers[found.name] = kind(found.parameter)
            kept.leaf.register_hook(partial(self._require_wanted, found.name))
        return kept

    def _require_wanted(self, name: str, gradient: torch.Tensor) -> None:
        """Refuse what a carrier must not take, as its own parameter would not."""
        here = (self._sums or {}).get(name)
        if here is None:
            raise GradientError(
                f"{_NAME}: backward must run inside the block of its forward, got one after it"
            )
        if not here.found.parameter.requires_grad:
            raise GradientError(
                f"{_NAME}: parameters must require gradients up to the end of the block, got "
                f"{name} frozen; end the block before, or leave it out by parameters="
            )

    def _open(self, name: str) -> list[_Sum]:
        if self._sums is None:
            raise GradientError(
                f"{_NAME}.{name}: the block must be open, got none or one that is finished"
            )
        return [*self._sums.values()]

    def _close(self) -> None:
        for each in (self._sums or {}).values():
            each.detach()
        self._sums = None

    def _ranks(self) -> int:
        """How many ranks add."""
        if self._group is not None or (dist.is_available() and dist.is_initialized()):
            return dist.get_world_size(self._group)
        return 1

    def _reduced(self, states: torch.Tensor) -> torch.Tensor:
        if self._ranks() > 1:
            dist.all_reduce(states, group=self._group)
        return states

    def _write_chain(self, found: Found, total: torch.Tensor, divide_by: int) -> None:
        """Round a chain once, or twice where it is divided."""
        dtype = torch.float32 if self._main_grad else found.parameter.dtype
        if divide_by > 1:
            # Not by a number: on GPUs torch multiplies by its reciprocal.
            total = total / total.new_full((), divide_by)
        _hand_over(found.parameter, total.to(dtype), self._main_grad)

    def _write(self, sums: list[Found], states: torch.Tensor, divide_by: int) -> None:
        """Round states that lie side by side, and hand each parameter its own."""
        widths = [found.parameter.numel() for found in sums]
        rounded: dict[torch.dtype, tuple[torch.Tensor, ...]] = {}
        for place, found in enumerate(sums):
            parameter = found.parameter
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
