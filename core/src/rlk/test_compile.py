# SPDX-License-Identifier: Apache-2.0
"""Compiled calls give the bits of eager ones, forward and backward, on the requested backend."""

import threading

import pytest
import torch

import rlk
from rlk.compare import assert_same_bits
from rlk.operator import Backend
from rlk.publish import publish
from rlk.test_support import small_integers, tiny_backend, tiny_operator

first, second = tiny_backend("first"), tiny_backend("second")
published = publish(
    tiny_operator(
        "tiny_compile",
        backends=(
            Backend("first", lambda: first, ("cpu",)),
            Backend("second", lambda: second, ("cpu",)),
        ),
    )
)
LAYOUTS = {
    "contiguous": lambda t: t,
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def call(x, weight, factor=1.0, backend=None):
    return published((x, weight), {"factor": factor}, backend)[0]


def compiled(function, **options):
    """Compiled without graph breaks, so that nothing runs eagerly in secret."""
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def gradients(function, x, weight, *rest):
    """y, dx and dweight on fresh leaves of the given layout."""
    x, weight = (t.detach().requires_grad_() for t in (x, weight))
    y = function(x, weight, *rest)
    upstream = small_integers(*y.shape, seed=2).to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, (x, weight), upstream)


def assert_all_same(got, want):
    for name, a, b in zip(("y", "dx", "dweight"), got, want, strict=True):
        assert_same_bits(a, b, name)


def ran(function, *arguments):
    """The backends on which a call ran."""
    with rlk.trace() as launches:
        function(*arguments)
    return [launch.backend for launch in launches]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compile_fullgraph_equals_eager_bits(dtype, layout):
    x = LAYOUTS[layout](torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)))
    x, weight = x.to(dtype), torch.randn(4, generator=torch.Generator().manual_seed(1))

    def block(a, b):
        # What surrounds an operator in a model: a residual, an in-place step, a reshape.
        return (call(a + 1, b).mul_(2) + a).reshape(-1, 2)

    assert_all_same(gradients(compiled(block), x, weight), gradients(block, x, weight))


def test_compile_dynamic_sizes_equal_eager_bits():
    function, weight = compiled(call, dynamic=True), small_integers(4)
    for shape in ((3, 4), (7, 4), (2, 3, 4), (1, 4), (0, 4), (4,)):
        x = small_integers(*shape, seed=3)
        assert_all_same(gradients(function, x, weight), gradients(call, x, weight))


def test_compile_marked_dynamic_rows_are_compiled_once():
    graphs, weight = [], small_integers(4)
    function = torch.compile(call, fullgraph=True, backend=lambda g, _: graphs.append(g) or g)
    for count in (3, 7, 500):
        x = small_integers(count, 4)
        torch._dynamo.mark_dynamic(x, 0)
        assert_same_bits(function(x, weight), call(x, weight))
    assert len(graphs) == 1


@pytest.mark.parametrize("dynamic", [None, True])
def test_compile_scalar_argument_follows_its_value(dynamic):
    function, (x, weight) = compiled(call, dynamic=dynamic), (small_integers(2, 4), torch.ones(4))
    for factor in (1.0, 0.5, 3):
        got = gradients(function, x, weight, factor)
        assert_all_same(got, gradients(call, x, weight, factor))


def test_compile_needed_gradients_alone_are_asked_for():
    x, weight = small_integers(2, 4), small_integers(4).requires_grad_()
    first.needs.clear()
    compiled(call)(x, weight).sum().backward()
    assert first.needs == [frozenset({"weight"})]


def test_compile_without_gradients_launches_no_backward():
    x, weight = small_integers(2, 4), small_integers(4)
    with rlk.trace() as launches:
        assert not compiled(call)(x, weight).requires_grad
    assert [launch.direction for launch in launches] == ["forward"]


def test_compile_backend_of_the_context_is_followed_at_every_call():
    function, arguments = compiled(call), (small_integers(2, 4), small_integers(4))
    assert ran(function, *arguments) == ["first"]
    with rlk.use_backend("second"):
        assert ran(function, *arguments) == ["second"]
        with rlk.use_backend("auto"):
            assert ran(function, *arguments) == ["first"]
        assert ran(function, *arguments, 1.0, "first") == ["first"]
    assert ran(function, *arguments) == ["first"]


def test_compile_backend_of_another_threads_context_is_not_followed():
    function, arguments = compiled(call), (small_integers(2, 4), small_integers(4))
    found = {}

    def work(name):
        found[name] = ran(function, *arguments)

    with rlk.use_backend("second"):
        found["caller"] = ran(function, *arguments)
        thread = threading.Thread(target=work, args=("thread",))
        thread.start()
        thread.join()
    assert found == {"caller": ["second"], "thread": ["first"]}


def test_compile_context_inside_the_region_covers_its_calls_alone():
    def function(x, weight):
        with rlk.use_backend("second"):
            x = call(x, weight)
        return call(x, weight)

    arguments = (small_integers(2, 4), small_integers(4))
    assert ran(compiled(function), *arguments) == ["second", "first"]
    assert ran(call, *arguments) == ["first"]


def test_compile_context_across_a_graph_break_covers_its_calls():
    def function(x, weight):
        with rlk.use_backend("second"):
            x = call(x, weight)
            torch._dynamo.graph_break()
            x = call(x, weight)
        return call(x, weight)

    broken = torch.compile(function, backend="aot_eager")
    arguments = (small_integers(2, 4), small_integers(4))
    assert ran(broken, *arguments) == ["second", "second", "first"]
    assert ran(call, *arguments) == ["first"]


def test_compile_backward_after_the_context_runs_on_the_backend_of_forward():
    x = small_integers(2, 4).requires_grad_()
    with rlk.use_backend("second"):
        y = compiled(call)(x, small_integers(4))
    with rlk.trace() as launches, rlk.use_backend("first"):
        y.sum().backward()
    assert [launch.backend for launch in launches] == ["second"]


def test_compile_wrong_argument_is_refused_by_name():
    with pytest.raises(Exception, match=r"tiny_compile: weight must be \[N\] with N=4, got \[3\]"):
        compiled(call)(small_integers(2, 4), small_integers(3))


def test_compiled_autograd_of_an_eager_forward_equals_eager_bits():
    x, weight = small_integers(2, 3, 4).requires_grad_(), small_integers(4).requires_grad_()
    want = torch.autograd.grad(call(x, weight).sum(), (x, weight))
    with torch._dynamo.compiled_autograd._enable(
        torch.compile(backend="aot_eager", fullgraph=True)
    ):
        call(x, weight).sum().backward()
    assert_same_bits(x.grad, want[0])
    assert_same_bits(weight.grad, want[1])


class Module(torch.nn.Module):
    def forward(self, x, weight):
        return call(x, weight)


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_the_operator_and_serves_other_batches(strict):
    rows = torch.export.Dim("rows")
    x, weight = small_integers(3, 4), small_integers(4)
    program = torch.export.export(
        Module(), (x, weight), dynamic_shapes=({0: rows}, None), strict=strict
    )
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "rlk.tiny_compile.default" in targets
    other = small_integers(9, 4, seed=4)
    assert_same_bits(program.module()(other, weight), call(other, weight))
