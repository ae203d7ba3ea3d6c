# SPDX-License-Identifier: Apache-2.0
"""Triton against golden, byte for byte: every dtype, row length, activation and kind of data."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from rlk import interpreter, trace
from rlk.compare import assert_same_bits
from rlk.gates.inputs import VALUES

if find_spec("triton") is None or not (interpreter.is_enabled() or torch.cuda.is_available()):
    pytest.skip("needs triton, and a GPU or its interpreter", allow_module_level=True)

DEVICE = "cpu" if interpreter.is_enabled() else "cuda"
LENGTHS = (1, 3, 127, 128, 129, 256, 1000, 2048)
ROWS = (1, 7, 33)
PLAIN = [{"weight_offset": 0.0}, {"weight_offset": 1.0}]
GATED = [{"activation": a, **offset} for a in ("silu", "sigmoid") for offset in PLAIN]


def overflowing(generator, shape, dtype):
    # Sums of squares beyond FP32, in FP16 values beyond the dtype.
    return torch.randn(shape, generator=generator) * 1e25


KINDS = [*VALUES.values(), overflowing]


def mixture(generator, shape, dtype):
    """Each row of its own kind, from a random first one: one batch meets many combinations."""
    first = int(torch.randint(len(KINDS), (), generator=generator))
    kinds = [KINDS[(first + row) % len(KINDS)] for row in range(shape[0])]
    return torch.cat([kind(generator, (1, *shape[1:]), dtype) for kind in kinds])


def moved(tensors):
    """The tensors where Triton runs."""
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()}


def assert_agree(norm, batch):
    """Outputs, row gradients, and the exact state: rounding it would hide a difference."""
    expected = norm.results(batch, "golden")
    with trace() as launches:
        there = replace(batch, inputs=moved(batch.inputs), upstream=moved(batch.upstream))
        actual = norm.results(there, "triton")
    assert {launch.backend for launch in launches} == {"triton"}
    for name, tensor in expected.items():
        assert_same_bits(actual[name], tensor, name)


def mixed_batch(norm, dtype, n, rows, seed, scalars):
    narrow = seed % 2 and dtype != "float32"
    values = {**norm.batch().scalars, **scalars}
    batch = norm.batch(
        dtype, rows=rows, n=n, seed=seed, values=mixture, scalars=values,
        parameter_dtype="float32" if narrow else None,
    )  # fmt: skip
    batch.inputs["weight"][::5] = -0.0
    return batch


# The longest tests come first, so that parallel workers finish together.
def test_rms_norm_longest_row_agrees_in_every_byte(rms_norm):
    assert_agree(rms_norm, mixed_batch(rms_norm, "bfloat16", 65537, 1, 1, {}))


def test_rms_norm_gated_longest_rows_agree_in_every_byte(rms_norm_gated):
    assert_agree(rms_norm_gated, mixed_batch(rms_norm_gated, "float32", 65537, 7, 2, {}))


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("scalars", PLAIN, ids=str)
def test_rms_norm_mixed_rows_agree_in_every_byte(rms_norm, dtype, scalars, n):
    for seed, rows in enumerate(ROWS, start=n):
        assert_agree(rms_norm, mixed_batch(rms_norm, dtype, n, rows, seed, scalars))


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("scalars", GATED, ids=lambda s: f"{s['activation']}-{s['weight_offset']}")
def test_rms_norm_gated_mixed_rows_agree_in_every_byte(rms_norm_gated, dtype, scalars, n):
    for seed, rows in enumerate(ROWS, start=n):
        assert_agree(rms_norm_gated, mixed_batch(rms_norm_gated, dtype, n, rows, seed, scalars))


@pytest.mark.parametrize("kind", VALUES)
def test_dweight_upstream_of_one_kind_agrees_in_every_byte(norm, dtype, kind):
    batch = norm.batch(dtype, rows=33, n=129, seed=3)
    x = batch.inputs["x"]
    dy = VALUES[kind](torch.Generator().manual_seed(5), x.shape, x.dtype).to(x.dtype)
    golden = norm.run(batch.inputs, dy, "golden")
    triton = norm.run(moved(batch.inputs), dy.to(DEVICE), "triton")
    for name, tensor in golden.items():
        assert_same_bits(triton[name], tensor, name)
    assert golden["dweight"].count_nonzero() > 0


def underflowing(norm, n):
    """Rows whose squares underflow with eps 0, so that rstd is Inf; their dx is Inf, not NaN."""
    batch = norm.batch("float32", rows=3, n=n, scalars={**norm.batch().scalars, "eps": 0.0})
    ones = {name: torch.ones_like(tensor) for name, tensor in batch.inputs.items()}
    inputs = {**ones, "x": torch.full_like(batch.inputs["x"], 1e-30)}
    return replace(batch, inputs=inputs, upstream={"y": torch.ones_like(inputs["x"])})


@pytest.mark.parametrize("n", [5, 256, 264])
def test_padding_of_a_row_with_infinite_rstd_counts_nowhere(norm, n):
    batch = underflowing(norm, n)
    assert_agree(norm, batch)
    dx = norm.results(batch, "golden")["dx"]
    assert bool((dx == -torch.inf).all())
