# SPDX-License-Identifier: Apache-2.0
"""What is special to final_adaln_out: it is two operators behind each other, to the bit."""

import weakref

import pytest
import torch

from rlk import trace
from rlk.compare import assert_same_bits
from rlk.errors import ArgumentError
from rlk_qwenimage import adaln_mod_projection, final_adaln_out, layer_norm_modulate
from rlk_qwenimage.final_adaln_out.composition import Composition

NAMES = ("x", "temb", "weight", "bias")


def tensors(*leading, tokens=5, h=37, k=24, dtype=torch.float32, bias=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((*leading, tokens, h), (*leading, k), (2 * h, k), (2 * h,))
    made = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
    made[3] = made[3].to(bias or dtype)
    return [t.requires_grad_() for t in made]


def composed(x, temb, weight, bias, eps=1e-6, *, backend=None):
    modulation = adaln_mod_projection(temb, weight, bias, "final", backend=backend)
    return layer_norm_modulate(x, *modulation, eps, backend=backend)


def results(function, made, dout, wanted=NAMES, **options):
    """out and the wanted gradients by name."""
    leaves = {
        name: t.detach().requires_grad_(name in wanted) for name, t in zip(NAMES, made, strict=True)
    }
    out = function(*leaves.values(), **options)
    gradients = torch.autograd.grad(out, [leaves[name] for name in wanted], dout)
    return {"out": out.detach(), **{f"d{n}": g for n, g in zip(wanted, gradients, strict=True)}}


def assert_same(actual, expected):
    for name, tensor in expected.items():
        assert_same_bits(actual[name], tensor, name)


@pytest.mark.parametrize("leading", [(1,), (3,), (2, 2), ()])
def test_bits_are_those_of_the_two_operators_behind_each_other(backend, dtype, leading):
    made = tensors(*leading, dtype=getattr(torch, dtype))
    dout = torch.randn(made[0].shape).to(made[0].dtype)
    options = {"eps": 1e-3, "backend": backend}
    assert_same(
        results(final_adaln_out, made, dout, **options), results(composed, made, dout, **options)
    )


@pytest.mark.parametrize("wanted", [("x",), ("temb",), ("weight",), ("bias",), ("x", "bias")])
def test_bits_of_single_gradients_are_those_of_the_two_operators(backend, wanted):
    made = tensors(3, dtype=torch.bfloat16, bias=torch.float32)
    dout = torch.randn(made[0].shape).to(torch.bfloat16)
    found = results(final_adaln_out, made, dout, wanted, backend=backend)
    assert_same(found, results(composed, made, dout, wanted, backend=backend))
    assert set(found) == {"out", *(f"d{name}" for name in wanted)}


def test_scale_is_the_first_half_of_the_weight(backend):
    # silu(0) = 0: the bias alone modulates. A row of -1 and 1 is normalised already.
    x, temb = torch.tensor([[[-1.0, 1.0]]]), torch.zeros(1, 3)
    bias = torch.tensor([1.0, 2.0, 10.0, 20.0])
    out = final_adaln_out(x, temb, torch.ones(4, 3), bias, 0.0, backend=backend)
    assert_same_bits(out, torch.tensor([[[8.0, 23.0]]]), "out")


@pytest.mark.parametrize("tokens", [6032])
def test_cancelling_tokens_keep_small_terms_in_shift_and_bias(tokens):
    # Ones, one 2^26 and one -2^26: 6030. A tree of FP32 gives 6020.
    x = torch.randn(1, tokens, 2)
    dout = torch.ones(1, tokens, 2)
    dout[0, [tokens // 3, tokens // 2]] = torch.tensor([[2.0**26], [-(2.0**26)]])
    made = [x, torch.zeros(1, 3), torch.zeros(4, 3), torch.zeros(4)]
    found = results(final_adaln_out, made, dout, ("bias",))
    assert found["dbias"][2:].tolist() == [tokens - 2.0] * 2
    shift = torch.zeros(1, 2, requires_grad=True)
    out = layer_norm_modulate(x, torch.zeros(1, 2), shift)
    (dshift,) = torch.autograd.grad(out, shift, dout)
    assert dshift.tolist() == [[tokens - 2.0] * 2]


def test_cancelling_samples_keep_small_terms_in_the_bias():
    # One token a sample: the sum over samples has to be exact too.
    samples = 6032
    dout = torch.ones(samples, 1, 2)
    dout[[7, 4099]] = torch.tensor([2.0**26, -(2.0**26)]).view(2, 1, 1)
    made = [torch.ones(samples, 1, 2), torch.zeros(samples, 1), torch.zeros(4, 1), torch.zeros(4)]
    found = results(final_adaln_out, made, dout, ("bias",))
    assert found["dbias"][2:].tolist() == [samples - 2.0] * 2


def test_trace_names_the_kernels_of_both_operators_and_this_one_as_their_caller(backend):
    made = tensors(2)
    with trace() as launches:
        out = final_adaln_out(*made, backend=backend)
        out.backward(torch.ones_like(out))
    assert {launch.operator for launch in launches} == {"final_adaln_out"}
    assert {launch.backend for launch in launches} == {backend}
    for direction in ("forward", "backward"):
        kernels = [launch.kernel for launch in launches if launch.direction == direction]
        assert any("layer_norm_modulate" in kernel for kernel in kernels)
        own = "activation" if backend == "triton" else "adaln_mod_projection"
        assert any(own in kernel for kernel in kernels)


@pytest.mark.parametrize("samples", [1, 2])
def test_sums_are_those_of_dmod_or_freed_before_the_projection_runs(samples):
    made, alive, places = [], [], []

    class Norm:
        def backward(self, dout, x, scale, shift, *rest, into, **options):
            made.extend(map(weakref.ref, into.values()))
            places.extend(sums.data_ptr() for sums in into.values())
            return x, into["scale"].fill_(1.0), into["shift"].fill_(0.0)

    class Projection:
        def backward(self, dmod, *rest, **options):
            alive.extend(ref() for ref in made)
            places.append(dmod.data_ptr())
            return dmod, None, None

    x, temb, weight, bias = (t.detach() for t in tensors(samples, h=2))
    saved = temb, torch.zeros(samples, 4), None, None
    _, dmod, *_ = Composition(Projection(), Norm()).backward(
        x, x, temb, weight, bias, *saved, eps=0.0, needs=frozenset({"x", "temb"})
    )
    assert_same_bits(dmod, torch.tensor([[1.0, 1.0, 0.0, 0.0]] * samples), "dmod")
    assert alive == [None, None]
    # One sample's are not copied.
    assert (places[0] == places[2]) == (samples == 1)
    assert places[1] - places[0] == samples * 2 * dmod.element_size()


def test_gradient_of_x_alone_leaves_the_projection_out():
    made = tensors(2)
    with trace() as launches:
        results(final_adaln_out, made, torch.ones(made[0].shape), ("x",), backend="golden")
    backward = [launch.kernel for launch in launches if launch.direction == "backward"]
    assert backward == ["layer_norm_modulate_backward"]


@pytest.mark.parametrize(("samples", "tokens"), [(0, 5), (2, 0)])
def test_empty_calls_launch_nothing_and_have_zero_gradients(backend, samples, tokens):
    made = tensors(samples, tokens=tokens)
    with trace() as launches:
        found = results(final_adaln_out, made, torch.ones(made[0].shape), backend=backend)
    assert launches == []
    for name, tensor in zip(NAMES, made, strict=True):
        assert_same_bits(found[f"d{name}"], torch.zeros_like(tensor), f"d{name}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"weight": torch.ones(7, 3), "bias": torch.ones(7)},
            r"weight must be \[N, K\] with N = 2 \* H = 8, got N = 7",
        ),
        ({"bias": torch.ones(7)}, r"bias must be \[N\] with N=8, got \[7\]"),
        ({"temb": torch.ones(3, 3)}, r"temb must be \[2, K\] like x, got \[3, 3\]"),
        ({"temb": torch.ones(2, 3).half()}, "temb must be float32 like x, got float16"),
        ({"eps": -1.0}, "eps must be a finite float32 of at least 0.0, got -1.0"),
    ],
)
def test_argument_that_does_not_fit_is_refused_by_name(change, message):
    x, temb = torch.ones(2, 5, 4), torch.ones(2, 3)
    made = {"x": x, "temb": temb, "weight": torch.ones(8, 3), "bias": torch.ones(8), **change}
    with pytest.raises(ArgumentError, match=f"final_adaln_out: {message}"):
        final_adaln_out(**made)
