# SPDX-License-Identifier: Apache-2.0
"""The modules in a block of exact gradients: the bias sums samples exactly, the weight does not."""

import pytest
import torch

from rlk.compare import assert_same_bits, same_bits
from rlk.exact_grad import ExactGradAccumulator, new_carrier, state_of
from rlk.reduce import exact_sum
from rlk_qwenimage import AdaLayerNormContinuous, ModulationLinear, adaln_mod_projection

SAMPLES, TOKENS, WIDTH, EMBEDDING = 12, 3, 24, 16
PIECES = ((0, 1), (1, 6), (6, 12))


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Call:
    """A module, its bias, and the samples it reads."""

    def __init__(self, name):
        torch.manual_seed(0)
        temb = random(SAMPLES, EMBEDDING, seed=1)
        if name == "linear":
            self.module = ModulationLinear(EMBEDDING, WIDTH)
            self.bias, self.inputs = self.module.bias, [temb]
            self.dy = random(SAMPLES, WIDTH, seed=2)
        else:
            self.module = AdaLayerNormContinuous(WIDTH, EMBEDDING, elementwise_affine=False)
            self.bias = self.module.linear.bias
            self.inputs = [random(SAMPLES, TOKENS, WIDTH, seed=3), temb]
            self.dy = random(SAMPLES, TOKENS, WIDTH, seed=2)

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
