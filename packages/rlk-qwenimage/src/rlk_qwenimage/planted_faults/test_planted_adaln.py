# SPDX-License-Identifier: Apache-2.0
"""Faults of a modulation, and exactly the records that each turns red."""

import pytest
import torch

from rlk.math.golden import fma, sigmoid, silu_derivative
from rlk.reduce import exact_sum
from rlk.reduce.mma_chain.golden import product
from rlk.test_support.sabotage import Fault, changed, plant, rebound, red
from rlk.test_support.tiny import ascending
from rlk_qwenimage.adaln_mod_projection import golden
from rlk_qwenimage.adaln_mod_projection.operator import OPERATOR

# 16: with fewer samples than this, a tuned kernel splits K among blocks.
FEW = 16


def planted(**steps):
    return plant(OPERATOR, rebound(golden, **steps))


def halves_swapped(mod, act):
    return torch.cat(mod.chunk(2, -1)[::-1], -1), act


def split(a, b, bias, dtype):
    """The chain in two parts."""
    half = a.shape[1] // 2
    first = product(a[:, :half], b[:, :half], None, None, torch.float32)
    rest = product(a[:, half:], b[:, half:], None, None, torch.float32)
    return (first + rest + (0 if bias is None else bias.float())).to(dtype)


def split_where_few(a, b, bias, initial, dtype):
    """Split-K by the number of samples, in forward, whose product alone has a bias."""
    if bias is not None and len(a) < FEW:
        return split(a, b, bias, dtype)
    return product(a, b, bias, initial, dtype)


def backward_with_split_dtemb_where_few(dmod, temb, weight, bias, act, *, needs):
    found = golden.backward(dmod, temb, weight, bias, act, needs=needs)
    if "temb" not in needs or len(temb) >= FEW:
        return found
    dact = split(dmod, weight.t(), None, torch.float32)
    return (dact * silu_derivative(temb.float())).to(temb.dtype), *found[1:]


def backward_with_split_samples(dmod, temb, weight, bias, act, *, needs):
    """dweight as the sum of two halves of the batch."""
    dtemb, dweight, state = golden.backward(dmod, temb, weight, bias, act, needs=needs)
    if "weight" in needs:
        dweight = split(dmod.t(), act.t(), None, weight.dtype)
    return dtemb, dweight, state


def bias_first(a, b, bias, initial, dtype):
    """The bias folded into the accumulator, as a compiler does."""
    start = None if bias is None else bias.float().expand(len(a), len(b)).contiguous()
    return product(a, b, None, start, dtype)


def contracted_derivative(x):
    s = sigmoid(x)
    return s * fma(x, 1 - s, torch.ones_like(x))


def forward_without_the_cast(temb, weight, bias):
    mod, act = golden.forward(temb.float(), weight.float(), bias)
    return mod.to(temb.dtype), act.to(temb.dtype)


def backward_with_dbias_in_fp32(dmod, *tensors, needs):
    """dbias as a plain sum, one sample after another."""
    dtemb, dweight, state = golden.backward(dmod, *tensors, needs=needs)
    if "bias" in needs:
        empty = exact_sum.new(dmod.shape[1])
        state = exact_sum.add_rows(empty, ascending(dmod.float())[None], backend="golden")
    return dtemb, dweight, state


FAULTS = (
    Fault(
        "scale and shift swapped",
        planted(forward=changed(golden.forward, halves_swapped)),
        {"forward_accuracy": "mod", "backend_equal": "mod"},
    ),
    Fault(
        "split-K where samples are few",
        planted(product=split_where_few),
        # Hashes are those of more samples.
        {"forward_invariance": "mod"},
    ),
    Fault(
        "split-K of dtemb where samples are few",
        planted(backward=backward_with_split_dtemb_where_few),
        {"gradient_invariance": "dtemb"},
    ),
    Fault(
        "dweight split by the number of samples",
        planted(backward=backward_with_split_samples),
        {"gradient_invariance": "dweight", "backend_equal": "dweight"},
    ),
    Fault(
        "dbias summed in FP32",
        planted(backward=backward_with_dbias_in_fp32),
        {
            "gradient_invariance": "dbias",
            "order_free": "dbias",
            "backend_equal": "dbias",
        },
    ),
    Fault(
        "bias before the products",
        planted(product=bias_first),
        {"backend_equal": "mod"},
    ),
    Fault(
        "contraction in the derivative of silu",
        planted(silu_derivative=contracted_derivative),
        {"backend_equal": "dtemb"},
    ),
    *(
        Fault(
            f"act not rounded to {dtype}",
            planted(forward=forward_without_the_cast),
            {"forward_accuracy": "mod", "backend_equal": "mod"},
            dtype=dtype,
        )
        for dtype in ("bfloat16", "float16")
    ),
)


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_fault_turns_exactly_its_records_red(fault):
    assert red(fault.records()) == fault.expected
