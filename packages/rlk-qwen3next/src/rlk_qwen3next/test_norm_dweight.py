# SPDX-License-Identifier: Apache-2.0
"""dweight is the exact sum over rows, rounded once: order, chunks and calls cannot change it."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from rlk import exact_sum
from rlk.compare import assert_same_bits

ROWS, N = 65, 5
# Significand bits, exponent of the smallest subnormal, and the first power of two too large.
DESTINATIONS = {
    torch.float32: (24, -149, 2.0**128),
    torch.bfloat16: (8, -133, 2.0**128),
    torch.float16: (11, -24, 2.0**16),
}


def cancelling(norm, dtype="float32", parameter_dtype=None):
    """A batch whose columns hold large terms that nearly cancel, beside small ones."""
    batch = norm.batch(dtype, rows=ROWS, n=N, seed=8, parameter_dtype=parameter_dtype)
    dy = batch.upstream["y"]
    for name, tensor in batch.inputs.items():
        if name != "weight":
            tensor[ROWS // 2 : 2 * (ROWS // 2)] = tensor[: ROWS // 2]
    dy[: ROWS // 2] *= 2.0**10
    # The second half returns all but the low bits of the first.
    dy[ROWS // 2 : 2 * (ROWS // 2)] = dy[: ROWS // 2] * -(1 - 2.0**-5)
    return batch


def state_of(norm, batch, backend, rows=slice(None)):
    """The exact state of dweight over some rows of the batch, by the operator of torch."""
    _, rstd = norm.forward(batch, "golden")
    inputs = {n: t if n == "weight" else t[rows] for n, t in batch.inputs.items()}
    part = replace(batch, inputs=inputs, upstream={"y": batch.upstream["y"][rows]})
    return norm.backward(part, rstd[rows], backend, needs=["weight"])[-1]


def contributions(norm, batch):
    """dy * (x * rstd) * act(gate), each step in NumPy float32."""
    _, rstd = norm.forward(batch, "golden")
    x, dy = batch.inputs["x"].float().numpy(), batch.upstream["y"].float().numpy()
    terms = dy * (x * rstd.numpy()[:, None])
    if norm.name == "rms_norm_gated":
        gate = batch.inputs["gate"].float().numpy()
        # sigmoid(64) is 1 and sigmoid(0) is 1/2 in FP32.
        terms = terms * np.where(gate == 64, gate, np.float32(0))
    assert terms.dtype == np.float32
    return terms


def nearest(total, dtype):
    """total * 2^-149 rounded to nearest even."""
    precision, smallest, too_large = DESTINATIONS[dtype]
    size = abs(total)
    step = max(size.bit_length() - precision, smallest + 149)
    quotient, rest = size >> step, size & (1 << step) - 1
    quotient += 2 * rest + (quotient & 1) > 1 << step
    value = math.ldexp(quotient, step - 149)
    value = value if value < too_large else math.inf
    return -value if total < 0 else value


def integer_sums(terms):
    """The exact sums of finite FP32 columns, in units of 2^-149."""
    return [sum(int(Fraction(float(t)) * 2**149) for t in column) for column in terms.T]


def with_plain_gates(batch):
    """Gates of 64 and 0 only, whose silu is 64 and 0."""
    if "gate" in batch.inputs:
        gate = batch.inputs["gate"]
        batch.inputs["gate"] = torch.where(gate > -1, 64.0, 0.0).to(gate.dtype)
    return batch


@pytest.mark.parametrize("parameter_dtype", [None, "float32"], ids=["weight=x", "weight=float32"])
def test_dweight_cancelling_rows_is_the_rational_sum_rounded_once(
    norm, backend, dtype, parameter_dtype
):
    batch = with_plain_gates(cancelling(norm, dtype, parameter_dtype))
    sums = integer_sums(contributions(norm, batch))
    target = batch.inputs["weight"].dtype
    expected = torch.tensor([nearest(s, target) for s in sums], dtype=torch.float64).to(target)
    dweight = norm.run(batch.inputs, batch.upstream["y"], backend)["dweight"]
    assert_same_bits(dweight, expected, "dweight")


def test_dweight_permuted_rows_has_the_same_state_and_bits(norm, backend):
    batch = with_plain_gates(cancelling(norm))
    expected = state_of(norm, batch, backend)
    generator = torch.Generator().manual_seed(2026)
    terms, folds = contributions(norm, batch), set()
    for _ in range(10):
        order = torch.randperm(ROWS, generator=generator)
        assert_same_bits(state_of(norm, batch, backend, order), expected, "state")
        folds.add(terms[order].cumsum(0)[-1].tobytes())
    # The order does show where FP32 rounds after every row.
    assert len(folds) > 1


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_dweight_merged_chunks_has_the_same_state_and_bits(norm, backend, chunk):
    batch = cancelling(norm)
    merged = exact_sum.new(N)
    for start in range(0, ROWS, chunk):
        part = state_of(norm, batch, backend, slice(start, start + chunk))
        merged = exact_sum.merge(merged, part, backend=backend)
    assert_same_bits(merged, state_of(norm, batch, backend), "state")
    whole = norm.run(batch.inputs, batch.upstream["y"], backend)["dweight"]
    assert_same_bits(exact_sum.round(merged, torch.float32, backend=backend), whole, "dweight")


def test_dweight_narrow_weight_is_rounded_once_not_twice(norm, backend):
    # 1 + 2^-8 + 2^-30 lies above a tie of BF16, but FP32 rounds it onto the tie.
    terms = torch.tensor([1.0, 2.0**-8, 2.0**-30])
    batch = norm.batch("bfloat16", rows=3, n=4)
    batch.inputs["x"] = torch.ones(3, 4, dtype=torch.bfloat16)
    batch.upstream["y"] = terms.bfloat16()[:, None].expand(3, 4).contiguous()
    scalars = {"eps": 0.0}
    if "gate" in batch.inputs:
        batch.inputs["gate"] = torch.full((3, 4), 64.0, dtype=torch.bfloat16)
        scalars["activation"] = "sigmoid"
    run = norm.run(batch.inputs, batch.upstream["y"], backend, **scalars)
    expected = torch.full((4,), 1 + 2.0**-7, dtype=torch.bfloat16)
    assert_same_bits(run["dweight"], expected, "dweight")


def test_dweight_large_opposite_terms_keeps_the_small_ones(norm, backend):
    # Ones with +2^26 and -2^26 among them: FP32 sums lose ones between the two.
    rows = 35
    batch = norm.batch(rows=rows, n=3)
    batch.inputs["x"] = torch.ones(rows, 3)
    dy = torch.ones(rows, 3)
    dy[2], dy[-2] = 2.0**26, -(2.0**26)
    scalars = {"eps": 0.0}
    if "gate" in batch.inputs:
        batch.inputs["gate"] = torch.full((rows, 3), 64.0)
        scalars["activation"] = "sigmoid"
    run = norm.run(batch.inputs, dy, backend, **scalars)
    assert_same_bits(run["dweight"], torch.full((3,), float(rows - 2)), "dweight")
