# SPDX-License-Identifier: Apache-2.0
"""Faults of the modulated last norm, and exactly the records that each turns red."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlk.gates import cases, judge
from rlk.math.golden import fma
from rlk.reduce.mma_chain.golden import product
from rlk.test_support.sabotage import Fault, plant, rebound, red
from rlk.test_support.tiny import ascending
from rlk_qwenimage.adaln_mod_projection import golden as projection
from rlk_qwenimage.final_adaln_out.composition import Composition
from rlk_qwenimage.final_adaln_out.operator import OPERATOR
from rlk_qwenimage.layer_norm_modulate import golden as norm


def planted(**changes):
    """The operator of golden's norm with some of its steps changed."""
    both = Composition(projection, rebound(norm, **changes))
    return plant(OPERATOR, SimpleNamespace(forward=both.forward, backward=both.backward))


def planted_projection(**changes):
    """The operator of golden's projection with some of its steps changed."""
    both = Composition(rebound(projection, **changes), norm)
    return plant(OPERATOR, SimpleNamespace(forward=both.forward, backward=both.backward))


def forward_shift_first(x, scale, shift, *, eps):
    return norm.forward(x, shift, scale, eps=eps)


def backward_shift_first(dout, x, scale, shift, *saved, into=None, **options):
    # None where only dx is asked for.
    swapped = {"scale": into["shift"], "shift": into["scale"]} if into else {}
    return norm.backward(dout, x, scale, shift, *saved, into=swapped, **options)


def contracted(xhat, scale, shift):
    return fma(xhat, norm.factor(scale).expand_as(xhat), shift.float()[:, None].expand_as(xhat))


def sums_in_fp32(terms, dtype, memory):
    return memory.copy_(ascending(terms.movedim(1, 0)))


def factor_of_narrow_numbers(scale):
    """1 + scale rounded to the dtype of scale."""
    return (1 + scale)[:, None].float()


def sums_towards_zero(terms, dtype, memory):
    """BF16 sums with what is below their last bit cut off."""
    exact = norm.token_sums(terms, torch.float32)
    return memory.copy_((exact.view(torch.int32) & ~0xFFFF).view(torch.float32))


def forward_with_mod_a_number_away(temb, weight, bias):
    mod, act = projection.forward(temb, weight, bias)
    return torch.where(mod.isfinite(), (mod.view(torch.int16) + 1).view(mod.dtype), mod), act


class WithAnotherMod(Composition):
    """Normalises with a mod four numbers from the one that it stores."""

    def forward(self, x, temb, weight, bias, *, eps):
        _, act, mod, mean, rstd = super().forward(x, temb, weight, bias, eps=eps)
        other = (mod.view(torch.int16) + 4).view(mod.dtype)
        return self.norm.forward(x, *other.chunk(2, 1), eps=eps)[0], act, mod, mean, rstd


FAULTS = (
    Fault(
        "shift and scale swapped",
        planted(forward=forward_shift_first),
        {"forward_accuracy": "out", "backend_equal": "out"},
    ),
    Fault(
        "gradients of shift and scale swapped",
        planted(backward=backward_shift_first),
        {
            # What follows is right given it.
            "gradient_accuracy": "dmod",
            "backend_equal": "dtemb dweight dbias",
            # NaN arrives in the other half.
            "special_values": "dweight dbias",
        },
    ),
    *(
        Fault(
            f"mod stored a number away in {dtype}",
            planted_projection(forward=forward_with_mod_a_number_away),
            # What follows is right given it.
            {"forward_accuracy": "mod", "backend_equal": "out mod dx"},
            dtype=dtype,
        )
        for dtype in ("bfloat16", "float16")
    ),
    Fault(
        "out made of another mod than the stored one",
        plant(OPERATOR, WithAnotherMod(projection, norm)),
        {"forward_accuracy": "out", "backend_equal": "out"},
        dtype="bfloat16",
    ),
    Fault(
        "gradient of mod rounded towards zero",
        planted(token_sums=sums_towards_zero),
        {
            "gradient_accuracy": "dmod",
            "backend_equal": "dtemb dweight dbias",
        },
        dtype="bfloat16",
    ),
    Fault(
        "contraction of the modulation",
        planted(modulate=contracted),
        {"backend_equal": "out"},
    ),
    Fault(
        "tokens summed in FP32",
        planted(token_sums=sums_in_fp32),
        {
            "order_free": "dbias",
            "backend_equal": "dtemb dweight dbias",
        },
    ),
    Fault(
        "1 + scale rounded to BF16",
        planted(factor=factor_of_narrow_numbers),
        {
            "forward_accuracy": "out",
            "gradient_accuracy": "dx",
            "backend_equal": "out dx",
        },
        dtype="bfloat16",
    ),
)


def product_in_another_order(a, b, bias, initial, dtype):
    """The chain of golden along K from its end: what tensor cores may differ by."""
    return product(a.flip(1), b.flip(1), bias, initial, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("seed", range(4))
def test_products_of_another_order_are_accurate(seed, dtype):
    changed = planted_projection(product=product_in_another_order)
    changed = replace(changed, gate_sizes={"S": 5, "H": 264, "K": 100, "N": 528})
    for judgment in ("forward_accuracy", "gradient_accuracy"):
        (case,) = cases([changed], seed=seed, identity=f"{changed.name}/golden/{judgment}/{dtype}")
        assert red(judge(case)) == set()


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_fault_turns_exactly_its_records_red(fault):
    assert red(fault.records()) == fault.expected
