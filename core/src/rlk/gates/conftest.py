# SPDX-License-Identifier: Apache-2.0
"""A tiny operator, y = x * weight, and wrong versions of it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from rlk import backends
from rlk.gates import cases, golden_hashes, judge
from rlk.launch import start_golden
from rlk.operator import FLOATS, Claim, Operator, Reduction, Tensor, Workload
from rlk.reduce import exact_sum


def forward(x, weight):
    start_golden("scale_forward", __file__)
    return ((x.float() * weight.float()).to(x.dtype),)


def backward(dy, x, weight, *, needs):
    start_golden("scale_backward", __file__)
    dx = state = None
    if "x" in needs:
        dx = (dy.float() * weight.float()).to(x.dtype)
    if "weight" in needs:
        empty = exact_sum.new(x.shape[1])
        state = exact_sum.add_rows(empty, dy.float() * x.float(), backend="golden")
    return dx, state


def oracle(x, weight):
    return (x * weight,)


SCALE = Operator(
    name="scale",
    package="none",
    bits_version=1,
    formula="y = x * weight",
    inputs=(
        Tensor("x", ("...", "N"), FLOATS, gradient="row"),
        Tensor("weight", ("N",), ("=x", "float32"), gradient="parameter"),
    ),
    scalars=(),
    outputs=(Tensor("y", ("...", "N"), ("=x",)),),
    saved=(),
    reductions=(Reduction("dweight", "exact_sum", "T"),),
    category="elementwise",
    claims=(
        Claim("repeatable", ("y", "dx", "dweight")),
        Claim("batch_invariant", ("y", "dx")),
        Claim("order_free", ("dweight",)),
        Claim("backend_equal", ("y", "dx", "dweight")),
        Claim("gpu_to_gpu", ("y", "dx", "dweight")),
    ),
    workloads=(Workload("nowhere", {"T": 4, "N": 8}),),
    oracle=oracle,
    backends=(),
)


class Scale:
    """Versions of the operator, and what the gates say of them."""

    forward = staticmethod(forward)
    backward = staticmethod(backward)

    def operator(self, forward=forward, backward=backward, row=backends.golden, **fields):
        module = SimpleNamespace(forward=forward, backward=backward)
        return replace(SCALE, backends=(row(lambda: module),), **fields)

    def case(self, judgment, operator=None, dtype="float32", backend="golden", tier="short"):
        operator = operator or self.operator()
        identity = f"{operator.name}/{backend}/{judgment}/{dtype}"
        (case,) = cases([operator], identity=identity, tier=tier)
        return case

    def records(self, judgment, operator=None, **options):
        return judge(self.case(judgment, operator, **options))


@pytest.fixture
def scale(monkeypatch, tmp_path):
    """The operator, with a folder of its own for golden hashes."""
    monkeypatch.setattr(golden_hashes, "path", lambda operator: tmp_path / "golden_hashes.json")
    return Scale()
