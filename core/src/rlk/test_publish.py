# SPDX-License-Identifier: Apache-2.0
"""What torch learns about an operator: its schema, its shapes, and where it refuses to go."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.func import functionalize
from torch.utils._python_dispatch import TorchDispatchMode

from rlk.compare import assert_same_bits
from rlk.errors import ArgumentError, BackendError, RlkError
from rlk.execution import Execution
from rlk.operator import Backend, Scalar, Tensor
from rlk.publish import is_plain, publish
from rlk.reduce import exact_sum
from rlk.test_support import small_integers, tiny_backend, tiny_operator

published = publish(tiny_operator("tiny_publish"))
OPS = torch.ops.rlk
SCALARS = {"factor": 0.5}

LAYOUTS = {
    "contiguous": lambda t: t,
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda t: t[:1].expand_as(t),
    "misaligned": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
}
SHAPES = [(4,), (3, 4), (2, 3, 4), (0, 4), (2, 0, 3, 4)]
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


class Names(TorchDispatchMode):
    """Lists the operators that a block calls."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def inputs(*shape, dtype=torch.float32, layout="contiguous"):
    x = LAYOUTS[layout](small_integers(*shape, dtype=dtype))
    return x, small_integers(shape[-1], seed=1)


def expected(x, weight, factor=0.5):
    """(y, peak) in FP64, exact for small integers."""
    peak = x.double().abs().amax(-1)
    y = x.double() * peak[..., None] * weight.double() * factor
    return y.to(x.dtype), peak.float()


def facts(tensors):
    return [(t.shape, t.dtype, t.stride(), t.device.type) for t in tensors]


def test_schema_of_one_output_is_derived_from_the_declaration():
    assert str(OPS.tiny_publish.default._schema) == (
        "rlk::tiny_publish(Tensor x, Tensor weight, float factor, str backend)"
        " -> (Tensor y, Tensor peak)"
    )
    assert str(OPS.tiny_publish_backward.default._schema) == (
        "rlk::tiny_publish_backward(Tensor dy, Tensor x, Tensor weight, Tensor peak, float factor,"
        " bool need_x, bool need_weight, str backend) -> (Tensor dx, Tensor dweight_state)"
    )


def test_schema_of_text_constants_and_several_outputs_is_derived_from_the_declaration():
    operator = tiny_operator(
        "tiny_publish_schema",
        inputs=(Tensor("x", ("...", "N"), ("float32",), gradient="row"),
                Tensor("position", ("...",), ("int64",))),
        scalars=(Scalar("mode", "a", choices=("a",)), Scalar("offset", 1.0, fixed=True)),
        results=2,
        saved=(),
    )  # fmt: skip
    publish(operator)
    assert str(OPS.tiny_publish_schema.default._schema) == (
        "rlk::tiny_publish_schema(Tensor x, Tensor position, str mode, float offset, str backend)"
        " -> (Tensor y, Tensor z)"
    )
    assert str(OPS.tiny_publish_schema_backward.default._schema) == (
        "rlk::tiny_publish_schema_backward(Tensor dy, Tensor dz, Tensor x, Tensor position,"
        " str mode, float offset, bool need_x, str backend) -> Tensor dx"
    )


@every_layout
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_any_layout_equals_the_formula_and_is_contiguous(shape, layout, dtype):
    x, weight = inputs(*shape, dtype=dtype, layout=layout)
    y, peak = expected(x, weight)
    for results in (
        (*published((x, weight), SCALARS), peak),
        OPS.tiny_publish(x, weight, 0.5, "golden"),
    ):
        assert_same_bits(results[0], y, "y")
        assert_same_bits(results[1], peak, "peak")
        assert all(result.is_contiguous() for result in results)


def backward_arguments(x, weight, needs=(True, True), layout="contiguous"):
    y, peak = expected(x, weight)
    return (LAYOUTS[layout](y), x, weight, peak, 0.5, *needs, "golden")


def as_fake(arguments, convert):
    return [convert(a) if isinstance(a, torch.Tensor) else a for a in arguments]


@every_layout
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fake_results_of_any_layout_have_the_shape_dtype_and_strides_of_real_ones(shape, layout):
    x, weight = inputs(*shape, dtype=torch.bfloat16, layout=layout)
    calls = [(OPS.tiny_publish, (x, weight, 0.5, "golden"))]
    for needs in product((True, False), repeat=2):
        calls.append((OPS.tiny_publish_backward, backward_arguments(x, weight, needs, layout)))
    for op, arguments in calls:
        real = [tuple(fact[:3]) for fact in facts(op(*arguments))]
        mode = FakeTensorMode()
        with mode:
            fake = op(*as_fake(arguments, mode.from_tensor))
        meta = op(*as_fake(arguments, lambda t: t.to("meta")))
        assert [tuple(fact[:3]) for fact in facts(fake)] == real
        assert [tuple(fact[:3]) for fact in facts(meta)] == real
        assert {t.device.type for t in fake} == {"cpu"}
        assert {t.device.type for t in meta} == {"meta"}


@pytest.mark.parametrize("layout", ["contiguous", "strided", "expanded"])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (0, 4)], ids=str)
def test_opcheck_forward_and_backward_pass(shape, layout):
    x, weight = inputs(*shape, layout=layout)
    forward = (x.detach().requires_grad_(), weight.requires_grad_(), 0.5, "golden")
    torch.library.opcheck(OPS.tiny_publish.default, forward)
    arguments = backward_arguments(x, weight.detach(), layout=layout)
    torch.library.opcheck(OPS.tiny_publish_backward.default, arguments)


def test_opcheck_rounding_of_a_state_passes():
    state = exact_sum.add_rows(exact_sum.new(4), small_integers(3, 4))
    torch.library.opcheck(OPS.exact_sum_round.default, (state, torch.bfloat16, "golden"))


@pytest.mark.parametrize("kind", ["meta", "fake", "fake outside its mode"])
def test_call_without_data_is_differentiated(kind):
    mode = FakeTensorMode()
    convert = mode.from_tensor if "fake" in kind else lambda t: t.to("meta")
    x, weight = (convert(t).requires_grad_() for t in inputs(2, 3, 4, dtype=torch.float16))
    with mode if kind == "fake" else nullcontext():
        (y,) = published((x, weight), SCALARS)
        gradients = torch.autograd.grad(y.sum(), (x, weight))
    assert facts(gradients) == facts((x, weight))


def test_call_wrong_argument_is_refused_on_every_path():
    x, weight = inputs(2, 4)
    message = r"tiny_publish: weight must be \[N\] with N=4, got \[3\]"
    for device in ("cpu", "meta"):
        with pytest.raises(ArgumentError, match=message):
            published((x.to(device), weight[:3].to(device)), SCALARS)
        with pytest.raises(ArgumentError, match=message):
            OPS.tiny_publish(x.to(device), weight[:3].to(device), 0.5, "auto")
    with pytest.raises(ArgumentError, match="tiny_publish: x must be a tensor, got list"):
        published(([1.0], weight), SCALARS)


def test_call_plain_tensors_go_around_the_dispatcher_and_modes_do_not():
    x, weight = inputs(2, 4)
    assert is_plain((x, torch.nn.Parameter(weight)))
    assert not is_plain((x, weight.to("meta")))
    assert not is_plain((x, weight.as_subclass(type("Named", (torch.Tensor,), {}))))
    with Names() as listener:
        assert not is_plain((x, weight))
        (heard,) = published((x, weight), SCALARS)
    assert listener.names[0] == "rlk.tiny_publish.default"
    assert_same_bits(heard, *published((x, weight), SCALARS))


def test_call_traced_by_jit_records_the_operator():
    x, weight = (t.detach() for t in inputs(2, 4))
    assert is_plain((x, weight))
    traced = torch.jit.trace(lambda a: published((a, weight), SCALARS)[0], (x,))
    assert "rlk::tiny_publish" in str(traced.graph)
    assert_same_bits(traced(2 * x), *published((2 * x, weight), SCALARS))


def test_call_subclass_is_served_through_the_dispatcher():
    class Named(torch.Tensor):
        pass

    x, weight = inputs(2, 4)
    (y,) = published((x.as_subclass(Named), weight), SCALARS)
    assert_same_bits(torch.Tensor(y), expected(x, weight)[0])


def test_functionalize_results_and_gradients_equal_eager_bits():
    x, weight = (t.requires_grad_() for t in inputs(2, 3, 4))
    (eager,) = published((x, weight), SCALARS)
    function = functionalize(lambda a, b: published((a, b), SCALARS)[0])
    functional = function(x, weight)
    assert_same_bits(functional, eager)
    for got, want in zip(
        torch.autograd.grad(functional, (x, weight), eager.detach()),
        torch.autograd.grad(eager, (x, weight), eager.detach()),
        strict=True,
    ):
        assert_same_bits(got, want)


def test_vmap_is_refused_with_what_to_do():
    x, weight = inputs(5, 2, 4)
    with pytest.raises(ArgumentError) as caught:
        torch.vmap(lambda row: published((row, weight), SCALARS))(x)
    assert str(caught.value) == (
        "tiny_publish: the batch must be leading axes, got torch.vmap; call it on the whole batch"
    )
    y, peak = expected(x, weight)
    with pytest.raises(ArgumentError, match="tiny_publish_backward: the batch must be leading"):
        torch.vmap(
            lambda dy: OPS.tiny_publish_backward(
                dy, x[0], weight, peak[0], 0.5, True, True, "golden"
            )
        )(y)


def replaced(**functions):
    """An execution whose backend's functions are replaced."""
    module = tiny_backend()
    for name, function in functions.items():
        setattr(module, name, function)
    row = Backend("odd", lambda: module, ("cpu",))
    return Execution(tiny_operator("tiny", backends=(row,)))


@pytest.mark.parametrize(
    ("results", "got"),
    [((torch.ones(2, 4),), "1"), ((torch.ones(2, 4),) * 3, "3"), (torch.ones(2, 4), "Tensor"),
     (None, "NoneType")],
)  # fmt: skip
def test_backend_wrong_number_of_results_is_named(results, got):
    x, weight = inputs(2, 4)
    execution = replaced(forward=lambda *_, **__: results)
    with pytest.raises(BackendError) as caught:
        execution.forward(x, weight, 0.5, "odd")
    message = f'tiny: backend "odd" must return a tuple of 2 from forward, got {got}'
    assert str(caught.value) == message
    execution = replaced(backward=lambda *_, **__: results)
    with pytest.raises(BackendError) as caught:
        execution.backward(*backward_arguments(x, weight)[:-1], "odd")
    assert str(caught.value) == message.replace("forward", "backward")


def test_backend_gradient_that_is_needed_but_missing_is_named():
    x, weight = inputs(2, 4)
    execution = replaced(backward=lambda *_, **__: (torch.ones(2, 4), None))
    with pytest.raises(BackendError) as caught:
        execution.backward(*backward_arguments(x, weight)[:-1], "odd")
    assert str(caught.value) == ('tiny: backend "odd" must return the gradient of weight, got None')
    needs_x = backward_arguments(x, weight, (True, False))[:-1]
    dx, state = execution.backward(*needs_x, "odd")
    assert (dx.tolist(), state.numel()) == (torch.ones(2, 4).tolist(), 0)


def test_backend_gradient_that_is_not_needed_is_dropped():
    x, weight = inputs(2, 4)
    execution = replaced(backward=lambda *_, **__: (torch.ones(2, 4), exact_sum.new(4)))
    dx, state = execution.backward(*backward_arguments(x, weight, (False, True))[:-1], "odd")
    assert (dx.numel(), tuple(state.shape)) == (0, (exact_sum.STATE_ROWS, 4))


def test_backend_transposed_results_become_contiguous_with_equal_values():
    x, weight = inputs(2, 3, 4)
    y, peak = expected(x, weight)
    moved = LAYOUTS["transposed"]
    execution = replaced(
        forward=lambda *_, **__: (moved(y.view(6, 4)), LAYOUTS["strided"](peak.view(6))),
        backward=lambda *_, **__: (moved(y.view(6, 4)), moved(exact_sum.new(4))),
    )
    forward = execution.forward(x, weight, 0.5, "odd")
    backward = execution.backward(*backward_arguments(x, weight)[:-1], "odd")
    for got, want in zip(forward + backward, (y, peak, y, exact_sum.new(4)), strict=True):
        assert_same_bits(got, want)
        assert got.is_contiguous()


def test_publish_name_twice_is_refused_and_leaves_the_first_in_place():
    for _ in range(2):
        with pytest.raises(RlkError) as caught:
            publish(tiny_operator("tiny_publish"))
        assert str(caught.value) == (
            "tiny_publish: name must be new to torch, got torch.ops.rlk.tiny_publish defined "
            "before; rename the operator or publish it once"
        )
    x, weight = inputs(2, 4)
    assert_same_bits(*published((x, weight), SCALARS), expected(x, weight)[0])


@pytest.mark.parametrize("kind", ["plain", "meta"])
@pytest.mark.parametrize("backend", [5, ["golden"], torch.device("cpu")], ids=str)
def test_call_backend_that_is_no_name_is_refused_on_every_path(backend, kind):
    x, weight = inputs(2, 4)
    if kind == "meta":
        x, weight = x.to("meta"), weight.to("meta")
    with pytest.raises(BackendError) as caught:
        published((x, weight), SCALARS, backend)
    assert str(caught.value) == f"tiny_publish: backend must be a name, got {backend!r}"


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_call_nested_tensor_is_refused_by_one_sentence(layout):
    x, weight = inputs(2, 4)
    nested = torch.nested.nested_tensor([x, x[:1]], layout=layout)
    for leaf in (nested, nested.requires_grad_()):
        with pytest.raises(ArgumentError) as caught:
            published((leaf, weight), SCALARS)
        got = "a nested tensor" if layout == torch.strided else "torch.jagged"
        assert str(caught.value) == f"tiny_publish: x must be a dense tensor, got {got}"
