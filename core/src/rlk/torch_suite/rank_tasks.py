# SPDX-License-Identifier: Apache-2.0
"""What each rank of a distributed test does; every rank knows the whole batch."""

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.debug import CommDebugMode

from rlk import registry
from rlk.compare import assert_same_bits, same_bits
from rlk.exact_grad import ExactGradAccumulator
from rlk.gates.inputs import VALUES
from rlk.operator import Operator
from rlk.torch_suite.ranks import RANKS
from rlk.torch_suite.sample import (
    OperatorModule,
    Sample,
    assert_same_results,
    module_results,
    sample,
)

# Names of shardings: placements of (row tensors, parameters, upstream gradients).
SHARDINGS: dict[str, tuple[Placement, Placement, Placement]] = {
    "rows": (Shard(0), Replicate(), Shard(0)),
    "second_axis": (Shard(1), Replicate(), Shard(1)),
    "rows_and_parameters": (Shard(0), Shard(0), Shard(0)),
    "parameters": (Replicate(), Shard(0), Replicate()),
    "nothing": (Replicate(), Replicate(), Replicate()),
    "along_rows": (Shard(2), Replicate(), Shard(2)),
    "upstream_whole": (Shard(0), Replicate(), Replicate()),
    "partial_sums": (Partial("sum"), Replicate(), Partial("sum")),
}
# Divisible by the ranks, not divisible, and fewer rows than ranks.
LEADING = ((4, 3), (5, 3), (1, 3))


def find(package: str, name: str) -> Operator:
    """A declared operator, imported on this rank."""
    importlib.import_module(package)
    return next(o for o in registry.declared_in(package) if o.name == name)


def shard_operator(device: str, package: str, name: str, sharding: str) -> None:
    """A DTensor call has the bits of the whole one: outputs, row and parameter gradients."""
    operator = find(package, name)
    rows, parameter, upstream = SHARDINGS[sharding]
    mesh = init_device_mesh(device, (RANKS,))
    for leading in LEADING:
        made = sample(operator, device, leading=leading, values=VALUES["cancelling"])
        expected = made.results()
        if leading == LEADING[0]:
            _require_order_to_matter(made, expected)
        for wanted in ([n] for n in made.differentiable):
            _assert_sharded(made, mesh, (rows, parameter, upstream), wanted, expected)
        found = _assert_sharded(
            made, mesh, (rows, parameter, upstream), made.differentiable, expected
        )
        if leading[0] >= RANKS and sharding in ("rows", "second_axis", "upstream_whole"):
            with_rows = [f"d{t.name}" for t in operator.inputs if t.gradient == "row"]
            if operator.chain_parameters:
                with_rows = []  # backward had all rows
            for result in (*[t.name for t in operator.outputs], *with_rows):
                assert found[result].placements == (rows,), f"{result} was gathered"
        for declared in operator.parameters:
            assert found[f"d{declared.name}"].placements == (Replicate(),)


def shard_on_two_axes(device: str, package: str, name: str) -> None:
    """A mesh of two axes, of which each shards another leading axis."""
    made = sample(find(package, name), device, leading=(4, 3), values=VALUES["cancelling"])
    mesh = init_device_mesh(device, (RANKS, 1), mesh_dim_names=("data", "context"))
    placements = ([Shard(0), Shard(1)], [Replicate(), Replicate()], [Shard(0), Shard(1)])
    _assert_sharded(made, mesh, placements, made.differentiable, made.results())


def shard_other_dtypes(device: str, package: str, name: str) -> None:
    """Calls of equal shapes: what DTensor remembers of one dtype must not serve another."""
    operator = find(package, name)
    mesh = init_device_mesh(device, (RANKS,))
    for dtype, parameter_dtype in (("bfloat16", None), ("bfloat16", "float32"), ("float32", None)):
        made = sample(operator, device, dtype=dtype, parameter_dtype=parameter_dtype)
        placements = SHARDINGS["rows"]
        _assert_sharded(made, mesh, placements, made.differentiable, made.results())


def count_communication(device: str, package: str, name: str) -> None:
    """Rows sharded: forward needs no other rank, backward one sum of integers a parameter.

    Chains are left out: they need all rows.
    """
    operator = find(package, name)
    made = sample(operator, device, leading=LEADING[0])
    mesh = init_device_mesh(device, (RANKS,))
    placed = _placed(made, mesh, SHARDINGS["rows"])
    chains = [t.name for t in operator.chain_parameters]
    wanted = [n for n in made.differentiable if n not in chains]
    leaves = placed.leaves(wanted)
    with CommDebugMode() as comm:
        outputs = placed.call(*leaves.values())
    assert comm.get_total_counts() == 0, comm.get_comm_counts()
    named = [leaves[n] for n in wanted]
    with CommDebugMode() as comm:
        torch.autograd.grad(outputs, named, list(placed.batch.upstream.values()))
    counts = {str(op).rpartition(".")[2]: n for op, n in comm.get_comm_counts().items() if n}
    parameters = len(operator.exact_parameters)
    assert counts == ({"all_reduce": parameters} if parameters else {}), counts


def shard_compiled(device: str, package: str, name: str) -> None:
    """The compiled DTensor call has the bits of the eager whole one."""
    torch._dynamo.reset()
    made = sample(find(package, name), device, leading=LEADING[0])
    mesh = init_device_mesh(device, (RANKS,))
    placed = _placed(made, mesh, SHARDINGS["rows"])
    compiled = torch.compile(placed.call, fullgraph=True, backend="aot_eager")
    found = placed.results(compiled)
    assert_same_results(_whole(found), made.results(), "compiled DTensor")


def average_gradients(
    device: str, package: str, name: str, wrap: str, modules: Sequence[Callable[[], Any]]
) -> None:
    """DDP or FSDP2: rows as on one process, and the mean of the ranks' rounded gradients."""
    operator = find(package, name)
    # Without parameters there is nothing to average, and DDP refuses the module.
    for dtype in ("float32", "bfloat16") if operator.parameters else ():
        whole = sample(operator, device, leading=(2 * RANKS, 3), dtype=dtype)
        parts = [whole.rows(2 * rank, 2 * rank + 2) for rank in range(RANKS)]
        own = parts[dist.get_rank()]
        builders: list[Callable[[], torch.nn.Module]] = [partial(OperatorModule, whole), *modules]
        for build in builders:
            module = build().to(device=device, dtype=getattr(torch, dtype))
            with torch.no_grad():
                for declared, p in zip(operator.parameters, module.parameters(), strict=True):
                    p.copy_(whole.batch.inputs[declared.name])
            wrapped = _wrap(module, wrap, device)
            found = module_results(wrapped, own)
            single = [part.results() for part in parts]
            expected = dict(single[dist.get_rank()])
            for declared in operator.parameters:
                rounded = [run[f"d{declared.name}"] for run in single]
                # Two ranks: one addition, and a halving that is exact.
                expected[f"d{declared.name}"] = (rounded[0] + rounded[1]) * 0.5
                assert not same_bits(rounded[0], rounded[1])
            assert_same_results(_whole(found), expected, f"{wrap} {dtype} {type(module).__name__}")


def accumulate_exactly(
    device: str, package: str, name: str, wrap: str, modules: Sequence[Callable[[], Any]]
) -> None:
    """DDP or FSDP2 in an accumulator: exact parameters as in one call on the whole batch."""
    operator = find(package, name)
    whole = sample(operator, device, leading=(3 * RANKS, 3), values=VALUES["cancelling"])
    expected = whole.results()
    _require_order_to_matter(whole, expected)
    # Uneven, and as many on each rank: both wrappers communicate in every call.
    start = 3 * dist.get_rank()
    pieces = [whole.rows(start, start + 1), whole.rows(start + 1, start + 3)]
    builders: list[Callable[[], torch.nn.Module]] = [partial(OperatorModule, whole), *modules]
    for build in builders:
        module = build().to(device=device)
        with torch.no_grad():
            for declared, p in zip(operator.parameters, module.parameters(), strict=True):
                p.copy_(whole.batch.inputs[declared.name])
        wrapped = _wrap(module, wrap, device)
        with ExactGradAccumulator(wrapped) as sums:
            assert len(sums.report().exact) == len(operator.exact_parameters)
            for piece in pieces:
                module_results(wrapped, piece)
        found = dict(zip([t.name for t in operator.parameters], wrapped.parameters(), strict=True))
        for declared in operator.exact_parameters:
            gradient = found[declared.name].grad
            assert type(gradient) is (DTensor if wrap == "fsdp2" else torch.Tensor)
            (bits,) = _whole({declared.name: gradient}).values()
            where = f"d{declared.name} {wrap} {type(module).__name__}"
            assert_same_bits(bits, expected[f"d{declared.name}"], where)


def _wrap(module: torch.nn.Module, wrap: str, device: str) -> torch.nn.Module:
    if wrap == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        ids = [dist.get_rank()] if device == "cuda" else None
        return DistributedDataParallel(module, device_ids=ids)
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=init_device_mesh(device, (RANKS,)))
    for parameter in module.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Shard(0),)
    return module


def _assert_sharded(
    made: Sample, mesh: Any, placements: Any, wanted: Sequence[str], expected: Any
) -> dict[str, Any]:
    found: dict[str, Any] = _placed(made, mesh, placements).results(wanted=wanted)
    for tensor in found.values():
        assert not any(isinstance(p, Partial) for p in tensor.placements)
    where = f"{placements} {list(made.batch.inputs.values())[0].shape}, wanted {wanted}"
    whole = _whole(found)
    assert_same_results(whole, {n: expected[n] for n in whole}, where)
    assert len(whole) == len(made.operator.outputs) + len(wanted)
    return found


def _placed(made: Sample, mesh: Any, placements: Any) -> Sample:
    """The call on DTensors."""
    rows, parameter, upstream = ([p] if isinstance(p, Placement) else p for p in placements)
    with_rows = {t.name for t in made.operator.inputs if t.has_rows}

    def place(tensor: torch.Tensor, where: Any) -> torch.Tensor:
        if not any(isinstance(p, Partial) for p in where):
            return distribute_tensor(tensor, mesh, where)
        # -0 changes no number that it is added to.
        local = tensor if dist.get_rank() == 0 else torch.full_like(tensor, -0.0)
        return DTensor.from_local(local, mesh, where)

    made = made.map(lambda tensor: tensor)
    inputs = made.batch.inputs
    for name, tensor in inputs.items():
        inputs[name] = place(tensor, rows if name in with_rows else parameter)
    given = made.batch.upstream
    given.update({name: place(tensor, upstream) for name, tensor in given.items()})
    return made


def _whole(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in found.items()}


def _require_order_to_matter(made: Sample, expected: dict[str, torch.Tensor]) -> None:
    """The sum of parts that were rounded before has other bits: the test could fail."""
    half = made.batch.inputs[made.operator.inputs[0].name].shape[0] // 2
    parts = [made.rows(0, half).results(), made.rows(half, 2 * half).results()]
    for declared in made.operator.parameters:
        name = f"d{declared.name}"
        assert not same_bits(parts[0][name] + parts[1][name], expected[name])
        assert_same_bits(made.results()[name], expected[name], name)
