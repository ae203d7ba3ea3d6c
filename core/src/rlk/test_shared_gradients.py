# SPDX-License-Identifier: Apache-2.0
"""An output that is the sum of inputs stands for them in backward, and they share a gradient."""

import pytest
import torch

from rlk import backends
from rlk.bench.work import Work
from rlk.compare import assert_same_bits
from rlk.cuda.header import backward_layout
from rlk.execution import Execution
from rlk.launch import start_golden
from rlk.operator import FLOATS, Operator, Tensor, Workload


class Doubled:
    """y = 2 * total, total = a + b; what backward was given is kept."""

    def __init__(self):
        self.given = []

    def forward(self, a, b):
        start_golden("doubled_forward", __file__)
        return (a + b) * 2, a + b

    def backward(self, dy, dtotal, a, b, *, needs):
        start_golden("doubled_backward", __file__)
        self.given.append((a, b, needs))
        return (dy * 2 + dtotal if needs else None,)


@pytest.fixture
def doubled():
    return Doubled()


@pytest.fixture
def operator(doubled):
    rows = ("...", "N")
    return Operator(
        name="doubled", package="none", bits_version=1, formula="y = 2 * (a + b)",
        inputs=(Tensor("a", rows, FLOATS, gradient="row"), Tensor("b", rows, ("=a",), "row")),
        scalars=(),
        outputs=(Tensor("y", rows, ("=a",)), Tensor("total", rows, ("=a",), sum_of=("a", "b"))),
        saved=(), reductions=(), category="elementwise", claims=(),
        workloads=(Workload("nowhere", {"T": 4, "N": 8}),),
        oracle=lambda a, b: ((a + b) * 2, a + b),
        backends=(backends.golden(lambda: doubled),),
    )  # fmt: skip


def test_declaration_of_a_sum_has_one_gradient_for_its_terms(operator):
    assert operator.shared_gradients == ((0, 1),)
    assert [t.name for t in operator.returned_gradients] == ["a"]
    assert [operator.needed(w) for w in (["a"], ["b"], [])] == [(True,), (True,), (False,)]
    assert operator.kept(("a", "b"), ("y", "total")) == ("total", "total")
    names = [name for _, name in backward_layout(operator).fields]
    assert "da" in names
    assert "db" not in names


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_backward_gets_the_sum_and_its_gradient_reaches_every_term(operator, doubled, wanted):
    leaves = [torch.randn(3, 8).requires_grad_(w) for w in wanted]
    execution = Execution(operator)
    y, total = execution.call(*execution.arguments(leaves, {}, "golden"))
    dy, dtotal = torch.randn(3, 8), torch.randn(3, 8)
    wanting = [leaf for leaf in leaves if leaf.requires_grad]
    for gradient in torch.autograd.grad((y, total), wanting, (dy, dtotal)):
        assert_same_bits(gradient, dy * 2 + dtotal)
    ((a, b, needs),) = doubled.given
    assert needs == {"a"}
    for stands_in in (a, b):
        assert stands_in.data_ptr() == total.data_ptr()


def test_least_bytes_of_a_sum_count_its_terms_once_in_backward(operator):
    work = Work(operator, "nowhere", {"T": 4, "N": 8}, torch.float32)
    tensor = 4 * 4 * 8
    assert work.least_bytes("forward") == 4 * tensor
    # dy, dtotal and total are read, one gradient is written.
    assert work.least_bytes("backward") == 4 * tensor
    assert (work.streams("forward"), work.streams("backward")) == ((2, 2), (3, 1))
