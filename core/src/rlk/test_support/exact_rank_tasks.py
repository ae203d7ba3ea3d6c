# SPDX-License-Identifier: Apache-2.0
"""What each rank does in tests of exact gradients; groups are the first ranks of the world."""

import io
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor

from rlk.compare import assert_same_bits, same_bits
from rlk.errors import GradientError
from rlk.exact_grad import ExactGradAccumulator
from rlk.exact_grad.chain import add_ranks
from rlk.test_support.exact_layouts import (
    EIGHT,
    SAMPLES,
    STEPS,
    WHOLE,
    Chain,
    Layout,
    Model,
    assert_same_gradients,
    backward,
    chain_backward,
    gradients,
    layouts,
)


def _group(size: int) -> Any:
    """A group of the first ranks; None on a rank outside. Every rank must ask for it."""
    group = dist.new_group(range(size))
    return group if dist.get_rank() < size else None


def compare_layouts(device: str, size: int, divide_by: int) -> None:
    """Every layout on `size` ranks gives the bytes of one call on the whole batch."""
    group = _group(size)
    if group is None:
        return
    expected = _whole(divide_by)
    for layout in layouts(size):
        _assert_layout(group, layout, expected, divide_by)


def _whole(divide_by: int = 1) -> dict[str, torch.Tensor]:
    """Of one call, without a word to other ranks."""
    model = Model()
    with Alone(model) as sums:
        backward(model, WHOLE)
        sums.finalize(divide_by)
    return gradients(model)


class Alone(ExactGradAccumulator):
    """A block of this process, whatever others do."""

    def _ranks(self) -> int:
        return 1


def _assert_layout(
    group: Any, layout: Layout, expected: dict[str, torch.Tensor], divide_by: int = 1
) -> None:
    model = Model()
    with ExactGradAccumulator(model, group) as sums:
        backward(model, layout[dist.get_rank()])
        sums.finalize(divide_by)
    assert_same_gradients(gradients(model), expected, layout)


class Forgetful(ExactGradAccumulator):
    """A planted fault: rank 1 takes part in the reduction and keeps its own sum out."""

    def _reduced(self, states: torch.Tensor) -> torch.Tensor:
        return super()._reduced(states * 0 if dist.get_rank() == 1 else states)


def plant(device: str, fault: str) -> None:
    """A fault on one of two ranks: a comparison would find these gradients, and no others."""
    group = _group(2)
    if group is None:
        return
    model, pieces = Model(), [EIGHT[:4], EIGHT[4:]][dist.get_rank()]
    block = Forgetful if fault == "missing" else ExactGradAccumulator
    with block(model, group):
        backward(model, pieces)
        if fault == "twice" and dist.get_rank() == 1:
            backward(model, pieces[:1])
    found, expected = gradients(model), _whole()
    different = {name for name in expected if not same_bits(found[name], expected[name])}
    assert different == {"first.weight", "second.weight"}, different


def restart(device: str) -> None:
    """Three ranks are killed; three others, or one that adds their states, go on."""
    group = _group(3)
    own = _group(1)
    if group is None:
        return
    rank = dist.get_rank()
    first, rest = [EIGHT[:2], EIGHT[2:3], EIGHT[3:5]], [EIGHT[5:6], EIGHT[6:7], EIGHT[7:]]
    killed, buffer = Model(), io.BytesIO()
    with Alone(killed) as sums:
        backward(killed, first[rank])
        torch.save(sums.state_dict(), buffer)
    buffer.seek(0)
    state, model, expected = torch.load(buffer), Model(), _whole()
    with ExactGradAccumulator(model, group) as sums:
        sums.load_state_dict(state)
        backward(model, rest[rank])
    assert_same_gradients(gradients(model), expected, "on as many ranks")
    for tensor in state.values():
        dist.all_reduce(tensor, group=group)
    if own is not None:
        model = Model()
        with ExactGradAccumulator(model, own) as sums:
            sums.load_state_dict(state)
            backward(model, [piece for pieces in rest for piece in pieces])
        assert_same_gradients(gradients(model), expected, "on one rank")


def wrap_in_ddp(device: str, size: int, as_view: bool) -> None:
    """Micro-batches without synchronisation, clipping and two optimisers behind the block."""
    from torch.nn.parallel import DistributedDataParallel

    group = _group(size)
    if group is None:
        return
    pieces = EIGHT[dist.get_rank() :: size]
    model = Model()
    # Averaged over ranks, and so not alike in all layouts: without a gradient it stays alike.
    model.factor.requires_grad_(False)
    wrapped = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=as_view)
    single = Model()
    single.factor.requires_grad_(False)
    for step in range(3):
        with ExactGradAccumulator(wrapped, group):
            with wrapped.no_sync():
                backward(wrapped, pieces[:-1])
            backward(wrapped, pieces[-1:])
        with Alone(single):
            backward(single, WHOLE)
        assert_same_gradients(gradients(model), gradients(single), f"step {step}")
        _step(model)
        _step(single)
    for found, expected in zip(model.parameters(), single.parameters(), strict=True):
        assert_same_bits(found.detach(), expected.detach(), "parameter")


def _step(model: Model) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for part in (model.first, model.second):
        optimiser = torch.optim.SGD(part.parameters(), 0.1)
        optimiser.step()
        optimiser.zero_grad(set_to_none=False)


def shard(device: str, size: int, whole_model: bool) -> None:
    """fully_shard: gradients sharded as their parameters, clipped by its own reductions."""
    from torch.distributed.fsdp import fully_shard

    group = _group(size)
    if group is None:
        return
    mesh = DeviceMesh.from_group(group, device)
    model: Any = Model()
    for part in () if whole_model else (model.first, model.second):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    expected = _whole()
    with ExactGradAccumulator(model, group) as sums:
        assert sums.report().exact == ("first.weight", "second.weight")
        # As many calls on every rank: each gathers parameters from all.
        pieces = [(at, at + 1) for at in range(dist.get_rank(), SAMPLES, size)]
        model.set_requires_gradient_sync(False)
        backward(model, pieces[:-1])
        model.set_requires_gradient_sync(True)
        backward(model, pieces[-1:])
    parameters = [p for n, p in model.named_parameters() if n in expected]
    for parameter in parameters:
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == parameter.placements
    found = {n: p.grad.full_tensor() for n, p in model.named_parameters() if n in expected}
    assert_same_gradients(found, expected, "fully_shard")
    before = [p.grad.clone() for p in parameters]
    norm: Any = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    factor = torch.clamp(0.5 / (norm + 1e-6), max=1.0)
    for parameter, gradient in zip(parameters, before, strict=True):
        clipped = (gradient * factor).full_tensor()
        assert_same_bits(parameter.grad.full_tensor(), clipped, "clipped")


def add_chains(device: str, size: int, wrap: str) -> None:
    """Each rank continues its own chain; their sum has one order, and a fault stops all ranks."""
    group = _group(size)
    if group is None:
        return
    rank = dist.get_rank()
    # One call on each rank, as wrappers communicate in each; the fourth has no rows.
    pieces = [[piece] for piece in (*STEPS, (0, 0))[:size]]
    expected = None
    for own in pieces:
        alone = Chain()
        with Alone(alone, continue_chains=True):
            chain_backward(alone, own)
        assert alone.weight.grad is not None
        expected = alone.weight.grad if expected is None else expected + alone.weight.grad
    assert expected is not None
    model = _wrapped(Chain(), wrap, group, device)
    with ExactGradAccumulator(model, group, continue_chains=True) as sums:
        chain_backward(model, pieces[rank])
        (weight,) = sums.report().parameters
    (gradient,) = (p.grad for p in model.parameters())
    assert gradient is not None
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    assert_same_bits(whole, expected, f"dweight {wrap}")
    ranks = f"; {size} ranks then add in FP32 in their order, so bits depend on how many"
    assert weight.reason.endswith("of FP32 32" + (ranks if size > 1 else ""))
    fresh, ragged = Chain(), [(0, 31), (31, 80)] if rank == 0 else [(0, 32)]
    message = ""
    try:
        with ExactGradAccumulator(fresh, group, continue_chains=True):
            chain_backward(fresh, ragged)
    except GradientError as error:
        message = str(error)
    assert "every micro-batch but the last must have a multiple of 16 samples" in message


def _wrapped(model: nn.Module, wrap: str, group: Any, device: str) -> nn.Module:
    if wrap == "ddp":
        return nn.parallel.DistributedDataParallel(model, process_group=group)
    if wrap == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=DeviceMesh.from_group(group, device))
    return model


def sum_values(device: str) -> None:
    """FP32 values of all ranks, whose number of elements the ranks do not divide."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(6)
    values = torch.randn(ranks, 7, 3, generator=generator).to(device)
    total = values[0]
    for value in values[1:]:
        total = total + value
    assert_same_bits(add_ranks(values[rank], None, ranks), total, "sum in the order of ranks")
    reverse = values.flip(0)
    if ranks > 2:
        other = add_ranks(reverse[rank], None, ranks)
        assert not same_bits(other, total)


def use_default_group(device: str) -> None:
    """Without a group, all ranks of the world."""
    model, size = Model(), dist.get_world_size()
    with ExactGradAccumulator(model):
        backward(model, EIGHT[dist.get_rank() :: size])
    assert_same_gradients(gradients(model), _whole(), "default group")


def refuse_dtensors(device: str) -> None:
    """A carrier beside a DTensor, whose own sums over ranks are exact."""
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model: Any = Model().first
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate()]))
    x = distribute_tensor(torch.ones(4, 5), mesh, [Replicate()])
    message = ""
    with ExactGradAccumulator(model):
        try:
            model(x)
        except ValueError as error:
            message = str(error)
    assert message.endswith(
        "weight_sum must be None where weight is a DTensor, whose ranks add exact states, got a "
        "tensor"
    ), message
