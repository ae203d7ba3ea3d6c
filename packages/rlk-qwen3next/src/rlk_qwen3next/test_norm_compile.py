# SPDX-License-Identifier: Apache-2.0
"""Under torch.compile, fake tensors and opcheck the norms are the operators they are in eager."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rlk import trace, use_backend
from rlk.compare import assert_same_bits
from rlk.gates.layout import strided, transposed
from rlk_qwen3next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated, RMSNorm
from rlk_qwen3next.conftest import NEEDS_INTERPRETER
from rlk_qwen3next.test_norm_layout import swapped_leading_axes

LEADING, N = (2, 3), 32


ARRANGEMENTS = [torch.Tensor.contiguous, strided, transposed, swapped_leading_axes]


@pytest.fixture(params=ARRANGEMENTS, ids=lambda f: f.__name__)
def layout(request):
    return request.param


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def shaped(norm, layout, dtype="float32", leading=LEADING, **options):
    """A batch with several leading axes in a layout."""
    batch = norm.batch(dtype, rows=torch.Size(leading).numel(), n=N, seed=31, **options)
    for tensors in (batch.inputs, batch.upstream):
        for name, tensor in tensors.items():
            shape = tensor.shape if name == "weight" else (*leading, N)
            tensors[name] = layout(tensor.view(shape))
    return batch


def described(tensors):
    return [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]


@pytest.mark.parametrize("leading", [(6,), LEADING, (0, 3)])
def test_fake_tensors_have_the_shapes_and_strides_of_real_ones(norm, layout, leading):
    batch = shaped(norm, layout, "bfloat16", leading, parameter_dtype="float32")
    run = norm.run(batch.inputs, batch.upstream["y"], "golden")
    with FakeTensorMode() as mode:
        inputs = {name: mode.from_tensor(tensor) for name, tensor in batch.inputs.items()}
        fake = norm.run(inputs, mode.from_tensor(batch.upstream["y"]), "golden")
    assert described(fake.values()) == described(run.values())


def test_meta_tensors_have_the_shapes_and_strides_of_real_ones(norm, layout):
    batch = shaped(norm, layout, "bfloat16")
    run = norm.run(batch.inputs, batch.upstream["y"], "golden")
    inputs = {name: tensor.to("meta") for name, tensor in batch.inputs.items()}
    meta = norm.run(inputs, batch.upstream["y"].to("meta"), "golden")
    assert [d[:3] for d in described(meta.values())] == [d[:3] for d in described(run.values())]


def test_opcheck_of_the_forward_passes_on_any_layout(norm, backend, layout):
    batch = shaped(norm, layout)
    leaves = [tensor.detach().requires_grad_() for tensor in batch.inputs.values()]
    torch.library.opcheck(norm.forward_op, (*leaves, *batch.scalars.values(), backend))


@pytest.mark.parametrize("needs", ["all", "weight", "nothing"])
def test_opcheck_of_the_backward_passes_on_any_layout(norm, layout, needs):
    batch = shaped(norm, layout, "bfloat16", parameter_dtype="float32")
    _, rstd = norm.forward(batch, "golden")
    flags = [needs in ("all", name) for name in batch.inputs]
    tensors = (*batch.upstream.values(), *batch.inputs.values(), rstd)
    arguments = (*tensors, *batch.scalars.values(), *flags, "golden")
    torch.library.opcheck(norm.backward_op, arguments)


def test_opcheck_of_an_empty_batch_passes(norm):
    batch = shaped(norm, torch.Tensor.contiguous, leading=(0, 3))
    torch.library.opcheck(
        norm.forward_op, (*batch.inputs.values(), *batch.scalars.values(), "golden")
    )


class Compiled:
    """A norm whose public function is compiled; it runs as the norm does."""

    def __init__(self, norm, **options):
        self.function = torch.compile(norm.function, fullgraph=True, backend="aot_eager", **options)

    def __call__(self, tensors, backend, **scalars):
        return self.function(*tensors, backend=backend, **scalars)


def run_compiled(norm, batch, backend, monkeypatch, **options):
    monkeypatch.setattr(norm, "call", Compiled(norm, **options))
    run = norm.run(batch.inputs, batch.upstream["y"], backend)
    monkeypatch.undo()
    return run


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_gradients_have_the_bits_of_eager(norm, backend, layout, dynamic, monkeypatch):
    batch = shaped(norm, layout)
    expected = norm.run(batch.inputs, batch.upstream["y"], backend)
    run = run_compiled(norm, batch, backend, monkeypatch, dynamic=dynamic)
    for name, tensor in expected.items():
        assert_same_bits(run[name], tensor, name)
        assert run[name].stride() == tensor.stride()


def test_compiled_other_row_counts_and_eps_have_the_bits_of_eager(norm):
    compiled = torch.compile(norm.function, fullgraph=True, backend="aot_eager")
    for rows, eps in [(3, 1e-6), (4, 1e-6), (33, 1e-6), (1, 1e-6), (0, 1e-6), (3, 1e-5), (3, 1.0)]:
        tensors = norm.batch("bfloat16", rows=rows, n=N, seed=rows).inputs.values()
        expected = norm.call(tensors, eps=eps)
        assert_same_bits(compiled(*tensors, eps=eps), expected, f"{rows} rows, eps {eps}")


@pytest.mark.parametrize("build", [RMSNorm, Qwen3NextRMSNorm, Qwen3NextRMSNormGated])
def test_compiled_module_between_other_operators_has_the_bits_of_eager(build):
    module = build(N)

    def block(x):
        rows = x.transpose(0, 1)
        y = module(rows, rows) if build is Qwen3NextRMSNormGated else module(rows)
        # y is contiguous whatever the strides of its input, so that a view is legal.
        return y.view(-1, N) + rows.reshape(-1, N)

    x = torch.randn(*LEADING, N)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    results = []
    for function in (block, compiled):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        results.append([y.detach(), *torch.autograd.grad(y.sum(), [leaf, module.weight])])
    for expected, actual in zip(*results, strict=True):
        assert_same_bits(actual, expected)


@NEEDS_INTERPRETER
def test_compiled_call_follows_the_backend_asked_for(norm):
    tensors = list(norm.batch(rows=3, n=N).inputs.values())
    compiled = torch.compile(norm.function, fullgraph=True, backend="aot_eager")
    served = []
    for name in ("golden", "triton", "golden"):
        with use_backend(name), trace() as launches:
            compiled(*tensors)
        served += [launch.backend for launch in launches]
    assert served == ["golden", "triton", "golden"]


def test_exported_program_has_the_bits_of_eager(norm):
    class Call(torch.nn.Module):
        def forward(self, *tensors):
            return norm.function(*tensors)

    tensors = tuple(norm.batch(rows=3, n=N).inputs.values())
    program = torch.export.export(Call(), tensors)
    assert_same_bits(program.module()(*tensors), norm.call(tensors), "y")
