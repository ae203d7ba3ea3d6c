# SPDX-License-Identifier: Apache-2.0
"""A gradient that is a chain over rows: finished by backward, in the dtype of its parameter."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from rlk import sharding
from rlk.compare import assert_same_bits
from rlk.cuda import header
from rlk.operator import Tensor
from rlk.publish import publish
from rlk.test_support import small_integers, tiny_operator

OPERATOR = tiny_operator("tiny_chain", chain=True)
published = publish(OPERATOR)
# Both kinds beside each other: `weight` a chain, `bias` an exact sum.
BOTH = replace(
    OPERATOR, inputs=(*OPERATOR.inputs, Tensor("bias", ("N",), ("=x",), gradient="parameter"))
)


def call(x, weight):
    return published((x, weight), {"factor": 1.0})[0]


def gradient_of_weight(x, weight, dy):
    weight = weight.detach().requires_grad_()
    (found,) = torch.autograd.grad(call(x, weight), weight, dy)
    return found


def test_schema_returns_the_gradient_itself_and_not_a_state():
    assert [r.name for r in published.backward_op._schema.returns] == ["dx", "dweight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dweight_adds_rows_in_their_order_and_has_the_dtype_of_its_parameter(dtype):
    # In this order 1 is lost beside 2^30; an exact sum is 1.
    x = torch.ones(3, 2, dtype=dtype)
    dy = torch.tensor([[2.0**30], [1.0], [-(2.0**30)]]).to(dtype).expand(3, 2)
    found = gradient_of_weight(x, torch.ones(2, dtype=dtype), dy)
    assert_same_bits(found, torch.zeros(2, dtype=dtype), "dweight")
    turned = gradient_of_weight(x, torch.ones(2, dtype=dtype), dy.flip(0).roll(1, 0))
    assert_same_bits(turned, torch.ones(2, dtype=dtype), "dweight in another order")


def test_dweight_of_leading_axes_is_that_of_their_rows():
    x, dy = torch.randn(3, 5, 4), torch.randn(3, 5, 4)
    expected = gradient_of_weight(x.view(15, 4), torch.ones(4), dy.view(15, 4))
    assert_same_bits(gradient_of_weight(x, torch.ones(4), dy), expected, "dweight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dweight_of_no_rows_is_zero_in_the_dtype_of_its_parameter(dtype):
    x = torch.ones(0, 4, dtype=dtype)
    found = gradient_of_weight(x, torch.ones(4, dtype=dtype), x)
    assert_same_bits(found, torch.zeros(4, dtype=dtype), "dweight")
    direct = published.backward_op(
        x, x, torch.ones(4, dtype=dtype), x[:, 0].float(), 1.0, False, True, "auto"
    )
    assert_same_bits(direct[1], torch.zeros(4, dtype=dtype), "dweight of the operator of torch")


def test_compiled_call_has_the_bits_of_eager():
    x, dy = small_integers(7, 4).requires_grad_(), torch.randn(7, 4)
    weight = small_integers(4, seed=1).requires_grad_()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(x, weight), [x, weight], dy) for f in (compiled, call))
    for name, a, b in zip(("dx", "dweight"), found, expected, strict=True):
        assert_same_bits(a, b, name)


def test_struct_holds_a_pointer_to_the_gradient_and_no_state():
    fields = header.backward_layout(BOTH).fields
    assert ("void*", "dweight") in fields
    assert ("long long*", "dbias_state") in fields
    assert not {"dweight_state", "dbias"} & {name for _, name in fields}


@pytest.mark.parametrize("need_chain", [True, False])
def test_backward_rules_shard_rows_only_where_no_chain_is_needed(need_chain):
    whole, partial, x = Replicate(), Partial("sum"), torch.empty(3, 4, device="meta")
    n = torch.empty(4, device="meta")
    # dy, x, weight, bias, peak, factor, need_x, need_weight, need_bias, backend
    arguments = (x, x, n, n, x[:, 0], 1.0, True, need_chain, True, "auto")
    rules = sharding.backward_rules(BOTH, SimpleNamespace(args_schema=arguments))
    # dx, dweight, dbias_state, dy, x, weight, bias, peak
    rows = [Shard(0), whole, partial, Shard(0), Shard(0), whole, whole, Shard(0)]
    assert rules == [[whole] * 8] + ([] if need_chain else [rows])


def test_forward_rules_shard_rows_as_ever():
    x, n = torch.empty(3, 4, device="meta"), torch.empty(4, device="meta")
    rules = sharding.forward_rules(OPERATOR, SimpleNamespace(args_schema=(x, n, 1.0, "auto")))
    assert rules[1] == [Shard(0), Shard(0), Shard(0), Replicate()]
