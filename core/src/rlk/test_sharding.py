# SPDX-License-Identifier: Apache-2.0
"""The rules that DTensor is given, and when; what they do on ranks is tested for each operator."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from rlk import sharding
from rlk.operator import Tensor
from rlk.test_support import tiny_operator

R, P = Replicate(), Partial("sum")
OPERATOR = tiny_operator("tiny_sharding", results=2)
X, WEIGHT = torch.empty(2, 3, 4, device="meta"), torch.empty(4, device="meta")
PEAK = X[..., 0]
# One rank is enough: DTensor asks for rules on any mesh.
LATE_IMPORT = """
import sys, torch
from rlk.publish import publish
from rlk.test_support import small_integers, tiny_operator
published = publish(tiny_operator("tiny_sharding"))
assert "torch.distributed.tensor" not in sys.modules
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
x = distribute_tensor(small_integers(3, 4), mesh, [Shard(0)])
weight = distribute_tensor(small_integers(4), mesh, [Replicate()])
with torch.{mode}():
    y, = CALL
print(y.placements[0], y.full_tensor().tolist() == published(
    (small_integers(3, 4), small_integers(4)), {"factor": 1.0})[0].tolist())
dist.destroy_process_group()
"""
CALLS = {
    "public": 'published((x, weight), {"factor": 1.0})',
    "operator of torch": 'torch.ops.rlk.tiny_sharding(x, weight, 1.0, "auto")[:1]',
}


def schema(*arguments):
    return SimpleNamespace(args_schema=arguments)


def test_forward_rules_shard_each_leading_axis_and_never_the_row():
    rules = sharding.forward_rules(OPERATOR, schema(X, WEIGHT, 1.0, "auto"))
    # y, z, peak, x, weight
    assert rules == [
        [R, R, R, R, R],
        [Shard(0), Shard(0), Shard(0), Shard(0), R],
        [Shard(1), Shard(1), Shard(1), Shard(1), R],
    ]


@pytest.mark.parametrize("need_x", [True, False])
@pytest.mark.parametrize("need_weight", [True, False])
def test_backward_rules_states_are_partial_and_what_is_not_needed_is_whole(need_x, need_weight):
    arguments = (X, X, X, WEIGHT, PEAK, 1.0, need_x, need_weight, "auto")
    rules = sharding.backward_rules(OPERATOR, schema(*arguments))
    # dx, dweight_state, dy, dz, x, weight, peak
    assert rules[0] == [R] * 7
    for axis, rule in enumerate(rules[1:]):
        rows = Shard(axis)
        dx, state = rows if need_x else R, P if need_weight else R
        assert rule == [dx, state, rows, rows, rows, R, rows]
    assert len(rules) == 3


def test_forward_rules_result_without_rows_keeps_everything_whole():
    total = Tensor("z", ("N",), ("=x",))
    operator = replace(OPERATOR, outputs=(OPERATOR.outputs[0], total))
    assert sharding.forward_rules(operator, schema(X, WEIGHT, 1.0, "auto")) == [[R] * 5]


def test_rounding_rules_state_is_whole_before_it_is_rounded():
    assert sharding.rounding_rules(schema(torch.empty(13, 4))) == [[R, R]]


@pytest.mark.parametrize(
    ("call", "mode"),
    [("public", "no_grad"), ("public", "inference_mode"), ("operator of torch", "no_grad")],
)
def test_rules_dtensor_imported_after_publishing_are_found_at_the_first_call(call, mode):
    program = LATE_IMPORT.replace("{mode}", mode).replace("CALL", CALLS[call])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{program}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Gloo of torch 2.10 writes to standard output too.
    assert done.stdout.split()[-2:] == ["S(0)", "True"]
