# SPDX-License-Identifier: Apache-2.0
"""The norms of this package as their callers see them, and the backends that compute them."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

import rlk_qwen3next
from rlk import interpreter, registry
from rlk.gates.inputs import Fixture, fixture

# Before a kernel is imported: it decides there how it runs.
INTERPRETED = interpreter.enable_without_gpu()

OPERATORS = {o.name: o for o in registry.declared_in(rlk_qwen3next.__name__)}
NEEDS_INTERPRETER = pytest.mark.skipif(not INTERPRETED, reason="needs triton's interpreter")


class Norm:
    """One operator: its public function, its declaration and its operators of torch."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.operator = OPERATORS[name]
        self.function = getattr(rlk_qwen3next, name)
        self.forward_op = getattr(torch.ops.rlk, name).default
        self.backward_op = getattr(torch.ops.rlk, f"{name}_backward").default

    def batch(self, dtype: str = "float32", *, rows=7, n=129, seed=0, **options) -> Fixture:
        """Random inputs [rows, n], a weight [n] and an upstream gradient."""
        sizes = {"N": n}
        return fixture(self.operator, dtype, rows=rows, sizes=sizes, seed=seed, **options)

    def call(self, tensors: Iterable[torch.Tensor], backend: str | None = None, **scalars: Any):
        """y of the public function."""
        return self.function(*tensors, backend=backend, **scalars)

    def run(self, inputs: dict, dy: torch.Tensor, backend: str, wanted=None, **scalars: Any):
        """y and the wanted gradients by name, from the public function and autograd."""
        leaves = {name: tensor.detach() for name, tensor in inputs.items()}
        wanted = list(leaves) if wanted is None else wanted
        for name in wanted:
            leaves[name].requires_grad_()
        y = self.call(leaves.values(), backend, **scalars)
        gradients = torch.autograd.grad(y, [leaves[name] for name in wanted], dy)
        named = zip(wanted, gradients, strict=True)
        return {"y": y.detach(), **{f"d{name}": g for name, g in named}}

    def forward(self, batch: Fixture, backend: str, **scalars: Any):
        """(y, rstd), or (y, residual_out, rstd), of the operator of torch."""
        values = {**batch.scalars, **scalars}.values()
        return self.forward_op(*batch.inputs.values(), *values, backend)

    def backward(self, batch: Fixture, rstd, backend: str, needs=None, outputs=(), **scalars: Any):
        """Row gradients, then the exact state of dweight, of the operator of torch.

        `outputs` are those of forward, where one of them stands for inputs.
        """
        values = {**batch.scalars, **scalars}.values()
        flags = self.operator.needed(list(batch.inputs) if needs is None else needs)
        given = list(batch.inputs.values())
        kept = self.operator.kept(given, outputs) if outputs else given
        return self.backward_op(*batch.upstream.values(), *kept, rstd, *values, *flags, backend)

    def results(self, batch: Fixture, backend: str) -> dict[str, torch.Tensor]:
        """Outputs, rstd, the row gradients and the exact state of dweight."""
        *outputs, rstd = self.forward(batch, backend)
        *rows, state = self.backward(batch, rstd, backend, outputs=outputs)
        named = zip([t.name for t in self.operator.outputs], outputs, strict=True)
        gradients = zip(self.operator.returned_gradients, rows, strict=False)
        found = {**dict(named), "rstd": rstd, **{f"d{t.name}": g for t, g in gradients}}
        return {**found, "state": state}


@pytest.fixture(params=["rms_norm", "qwen3_next_rms_norm", "rms_norm_gated"])
def norm(request):
    return Norm(request.param)


# Those that run on GPUs alone, and those of a sum, among them.
EVERY_NORM = [
    "rms_norm", "qwen3_next_rms_norm", "rms_norm_gated",
    "rms_norm_residual", "rms_norm_vllm", "rms_norm_residual_vllm",
]  # fmt: skip


@pytest.fixture(params=EVERY_NORM)
def every_norm(request):
    return Norm(request.param)


@pytest.fixture
def rms_norm_residual():
    return Norm("rms_norm_residual")


@pytest.fixture
def rms_norm_vllm():
    return Norm("rms_norm_vllm")


@pytest.fixture
def rms_norm_residual_vllm():
    return Norm("rms_norm_residual_vllm")


@pytest.fixture
def rms_norm():
    return Norm("rms_norm")


@pytest.fixture
def qwen3_next_rms_norm():
    return Norm("qwen3_next_rms_norm")


@pytest.fixture
def rms_norm_gated():
    return Norm("rms_norm_gated")


@pytest.fixture(params=["golden", pytest.param("triton", marks=NEEDS_INTERPRETER)])
def backend(request):
    return request.param


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def dtype(request):
    return request.param
