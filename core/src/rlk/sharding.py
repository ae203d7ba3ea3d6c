# SPDX-License-Identifier: Apache-2.0
"""How DTensor may shard an operator: along rows, never along what a row's sum needs.

A parameter gradient leaves the backward operator as a partial sum of exact states. It is reduced as
integers and rounded after that, so its bits do not depend on how the rows were sharded. A chain
over rows has no such parts: where one is needed, backward gets all rows.
"""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from rlk.operator import Operator

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

# Placements of (*results, *tensor arguments) on one mesh axis, the cheapest to be taken.
Rules: TypeAlias = list[list["Placement | None"]]

_DTENSOR = "torch.distributed.tensor"
_waiting: list[tuple[Any, int, Callable[[Any], Rules]]] = []


def declare(operator: Operator) -> None:
    """Note the rules of an operator; they are registered once DTensor is there.

    Importing DTensor takes longer than importing everything else of rlk.
    """
    forward = getattr(torch.ops.rlk, operator.name).default
    backward = getattr(torch.ops.rlk, f"{operator.name}_backward").default
    count = len(operator.inputs)
    _waiting.append((forward, count, lambda schema: forward_rules(operator, schema)))
    count += len(operator.outputs) + len(operator.saved)
    _waiting.append((backward, count, lambda schema: backward_rules(operator, schema)))
    register_if_imported()


def register_if_imported() -> None:
    """Hand the noted rules to DTensor if the process has imported it."""
    if not _waiting or _DTENSOR not in sys.modules:
        return
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    propagator = DTensor._op_dispatcher.sharding_propagator
    while _waiting:
        op, tensors, rules = _waiting.pop()
        # Everything behind the tensors belongs to the key of DTensor's cache: it decides which
        # results there are, and of which dtype.
        info = RuntimeSchemaInfo(static_argnum=tensors)
        propagator.register_op_strategy(op, _strategy(op, rules), info)


def forward_rules(operator: Operator, schema: Any) -> Rules:
    """All whole, or rows sharded."""
    results, inputs = operator.outputs + operator.saved, operator.inputs
    return _rules(_leading_axes(operator, schema.args_schema), results, inputs)


def backward_rules(operator: Operator, schema: Any) -> Rules:
    """All whole, or, where no chain is needed, rows sharded and states partial sums."""
    from torch.distributed.tensor import Partial, Replicate

    arguments = operator.outputs + operator.inputs + operator.saved
    given = schema.args_schema[len(operator.outputs) :]
    rules = _rules(_leading_axes(operator, given), operator.returned_gradients, arguments)
    count = len(operator.returned_gradients)
    needs = schema.args_schema[-1 - count : -1]
    needed = [t for t, need in zip(operator.returned_gradients, needs, strict=True) if need]
    if any(t.gradient == "chain" for t in needed):
        return rules[:1]
    for rule in rules[1:]:
        for place, (declared, needed) in enumerate(
            zip(operator.returned_gradients, needs, strict=True)
        ):
            if not needed:
                rule[place] = Replicate()
            elif declared.gradient == "parameter":
                rule[place] = Partial("sum")
    return rules


def rounding_rules(schema: Any) -> Rules:
    """A state is whole before it is rounded: DTensor reduces partial sums in front of it."""
    from torch.distributed.tensor import Replicate

    return [[Replicate(), Replicate()]]


def declare_rounding(op: Any) -> None:
    """Note the rule of the operator that rounds states."""
    _waiting.append((op, 1, rounding_rules))
    register_if_imported()


def _leading_axes(operator: Operator, inputs: Sequence[Any]) -> int:
    """The number of axes that are flattened to rows."""
    for declared, strategy in zip(operator.inputs, inputs, strict=False):
        if declared.has_rows:
            return len(strategy.shape) - len(declared.shape) + 1
    return 0


def _rules(axes: int, results: Sequence[Any], inputs: Sequence[Any]) -> Rules:
    from torch.distributed.tensor import Replicate, Shard

    # The first of equally cheap rules is taken: whole tensors are not sharded unasked.
    rules: Rules = [[Replicate() for _ in (*results, *inputs)]]
    if not all(t.has_rows or t.is_parameter for t in results):
        return rules
    for axis in range(axes):
        rules.append([Shard(axis) if t.has_rows else Replicate() for t in (*results, *inputs)])
    return rules


def _strategy(op: Any, rules: Callable[[Any], Rules]) -> Callable[[Any], Any]:
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

    results = len(op._schema.returns)

    def strategy(schema: Any) -> Any:
        mesh = schema.get_mesh_from_args()
        return expand_to_full_mesh_op_strategy(mesh, schema, rules(schema), input_index=results)

    return strategy
