# SPDX-License-Identifier: Apache-2.0
"""The modules in a block of exact gradients: the bias sums exactly, the weight goes on as a chain.

In FP32 golden's chain rounds once for 32 samples: a cut elsewhere shows.
"""

import pytest
import torch

from rlk import trace, use_backend
from rlk.compare import assert_same_bits, same_bits
from rlk.errors import GradientError
from rlk.exact_grad import ExactGradAccumulator, accumulator, new_carrier, state_of
from rlk.exact_grad.chain import ChainCarrier
from rlk.reduce import exact_sum
from rlk_qwenimage import AdaLayerNormContinuous, ModulationLinear, adaln_mod_projection

SAMPLES, TOKENS, WIDTH, EMBEDDING = 12, 3, 24, 16
PIECES = ((0, 1), (1, 6), (6, 12))
CHAIN_SAMPLES, STEPS = 80, ((0, 32), (32, 80))
# The second micro-batch ends within a step.
WRONG = ((0, 32), (32, 40), (40, 80))


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Call:
    """A module, its bias, and the samples it reads."""

    def __init__(self, name, samples=SAMPLES, device="cpu", dtype=torch.float32):
        torch.manual_seed(0)
        temb = random(samples, EMBEDDING, seed=1)
        if name == "linear":
            module, inputs = ModulationLinear(EMBEDDING, WIDTH), [temb]
        else:
            module = AdaLayerNormContinuous(WIDTH, EMBEDDING, elementwise_affine=False)
            inputs = [random(samples, TOKENS, WIDTH, seed=3), temb]
        dy = random(*inputs[0].shape[:-1], WIDTH, seed=2)
        self.module = module.to(device, dtype)
        self.bias = (self.module if name == "linear" else self.module.linear).bias
        *self.inputs, self.dy = (t.to(device, dtype) for t in (*inputs, dy))

    def run(self, pieces):
        for start, stop in pieces:
            y = self.module(*(t[start:stop] for t in self.inputs))
            y.backward(self.dy[start:stop].to(y.dtype))
        return self.bias.grad


@pytest.mark.parametrize("name", ["linear", "output_norm"])
def test_module_in_micro_batches_has_the_bias_gradient_of_the_whole(name):
    expected = Call(name).run([(0, SAMPLES)])
    assert not same_bits(Call(name).run(PIECES), expected)
    call = Call(name)
    with ExactGradAccumulator(call.module) as sums:
        call.run(PIECES)
    assert_same_bits(call.bias.grad, expected, "dbias")
    (weight,) = [p for p in sums.report().parameters if p.name.endswith("weight")]
    assert weight.reason == "its gradient is a chain over rows, finished in every call"


@pytest.mark.parametrize("name", ["linear", "output_norm"])
def test_module_under_autocast_rounds_once_to_its_parameter(name):
    whole, pieces = Call(name), Call(name)
    for call, cut in ((whole, [(0, SAMPLES)]), (pieces, PIECES)):
        with ExactGradAccumulator(call.module), torch.autocast("cpu", torch.bfloat16):
            call.run(cut)
    assert whole.bias.grad.dtype == torch.float32
    assert_same_bits(pieces.bias.grad, whole.bias.grad, "dbias")
    assert not same_bits(whole.bias.grad, whole.bias.grad.bfloat16().float())


def test_function_with_a_carrier_leaves_the_bias_gradient_unrounded():
    call = Call("linear")
    weight, bias, carrier = call.module.weight, call.bias, new_carrier(call.bias)
    expected = call.run([(0, SAMPLES)]).clone()
    bias.grad = None
    for start, stop in PIECES:
        cut = adaln_mod_projection(
            call.inputs[0][start:stop], weight, bias, "final", bias_sum=carrier
        )
        torch.cat([cut.scale, cut.shift], -1).backward(call.dy[start:stop])
    assert_same_bits(exact_sum.round(state_of(carrier), torch.float32), expected, "dbias")
    assert_same_bits(bias.grad, torch.zeros(WIDTH), "bias.grad")


def chained(name, pieces, **place):
    """The gradients of a block that continues chains, by name."""
    call = Call(name, CHAIN_SAMPLES, **place)
    with ExactGradAccumulator(call.module, continue_chains=True) as sums:
        call.run(pieces)
    assert [n.rpartition(".")[2] for n in sums.report().chain] == ["weight"]
    return {n.rpartition(".")[2]: p.grad for n, p in call.module.named_parameters()}


def whole(name, **place):
    """The gradients of one ordinary call, by name."""
    call = Call(name, CHAIN_SAMPLES, **place)
    call.run([(0, CHAIN_SAMPLES)])
    return {n.rpartition(".")[2]: p.grad for n, p in call.module.named_parameters()}


def differing(name, pieces, **place):
    found, expected = chained(name, pieces, **place), whole(name, **place)
    return {n for n in expected if not same_bits(found[n], expected[n])}


@pytest.mark.parametrize("name", ["linear", "output_norm"])
def test_module_in_micro_batches_of_whole_steps_has_the_weight_gradient_of_the_whole(name):
    assert differing(name, STEPS) == set()
    assert not same_bits(rounded_in_every_call(name), whole(name)["weight"])


def rounded_in_every_call(name, **place):
    """The gradient of the weight in a block that continues no chain."""
    call = Call(name, CHAIN_SAMPLES, **place)
    with ExactGradAccumulator(call.module):
        call.run(STEPS)
    (weight,) = [p for n, p in call.module.named_parameters() if n.endswith("weight")]
    return weight.grad


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["linear", "output_norm"])
def test_module_in_micro_batches_on_a_gpu_has_the_gradients_of_the_whole(name, dtype, backend):
    place = {"device": "cuda", "dtype": dtype}
    with use_backend(backend), trace() as launches:
        assert differing(name, STEPS, **place) == set()
        assert not same_bits(rounded_in_every_call(name, **place), whole(name, **place)["weight"])
    # Outside an operator the end of a block rounds, by whatever backend.
    assert {launch.backend for launch in launches if launch.operator} == {backend}


@pytest.mark.parametrize("name", ["linear", "output_norm"])
def test_planted_cut_within_a_step_changes_the_weight_gradient_alone(name, monkeypatch):
    with pytest.raises(GradientError, match="a multiple of 16 samples, of FP32 32"):
        chained(name, WRONG)
    monkeypatch.setattr(accumulator, "refuse_faults", lambda *_: None)
    assert differing(name, WRONG) == {"weight"}


def test_planted_sum_of_finished_chains_changes_the_weight_gradient_alone(monkeypatch):
    def add(self, leaf):
        self.total = getattr(self, "total", 0) + leaf.grad
        leaf.grad = None

    def total(carrier_sum, group, ranks):
        (carrier,) = kept
        return carrier.total

    kept, clear = [], ChainCarrier.clear
    monkeypatch.setattr(ChainCarrier, "_go_on", add)
    monkeypatch.setattr(ChainCarrier, "clear", lambda self: (kept.append(self), clear(self)))
    monkeypatch.setattr(accumulator, "add_ranks", total)
    assert differing("linear", STEPS) == {"weight"}
