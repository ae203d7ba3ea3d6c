# SPDX-License-Identifier: Apache-2.0
"""The statistic of a row is one number, whichever norm takes it."""

import pytest
import torch

from rlk.compare import assert_same_bits, same_bits

OFFSETS = (0.0, 1.0)


@pytest.mark.parametrize("n", [128, 2048, 5120])
def test_rstd_same_rows_has_the_same_bits_in_every_norm(
    rms_norm, qwen3_next_rms_norm, rms_norm_gated, backend, dtype, n
):
    plain, centred = (norm.batch(dtype, rows=3, n=n) for norm in (rms_norm, qwen3_next_rms_norm))
    gated = rms_norm_gated.batch(dtype, rows=3, n=n, seed=1)
    gated.inputs["x"] = centred.inputs["x"] = plain.inputs["x"]
    _, expected = rms_norm.forward(plain, backend)
    assert expected.dtype == torch.float32
    found = [qwen3_next_rms_norm.forward(centred, backend)[1]]
    found += [rms_norm.forward(plain, backend, weight_offset=1.0)[1]]
    for activation in ("silu", "sigmoid"):
        for offset in OFFSETS:
            scalars = {"activation": activation, "weight_offset": offset}
            found.append(rms_norm_gated.forward(gated, backend, **scalars)[1])
    for rstd in found:
        assert_same_bits(rstd, expected, "rstd")


def test_rstd_rows_of_one_value_is_its_reciprocal(norm, backend):
    # 2^k: the sum of 256 squares, the mean and the root are exact.
    batch = norm.batch(rows=9, n=256)
    exponents = torch.arange(-4, 5).float()
    batch.inputs["x"] = torch.exp2(exponents)[:, None].expand(9, 256)
    _, rstd = norm.forward(batch, backend, eps=0.0)
    assert_same_bits(rstd, torch.exp2(exponents * -1.0), "rstd")


@pytest.mark.parametrize("eps", [0.0, 1e-45, 1e-42, 1e-6, 1, 3e38])
def test_rstd_zero_row_is_the_reciprocal_root_of_eps(norm, backend, eps):
    batch = norm.batch(rows=1, n=3)
    batch.inputs["x"] = torch.zeros(1, 3)
    _, rstd = norm.forward(batch, backend, eps=eps)
    # The root and the reciprocal are each rounded to FP32; FP64 is wide enough for both.
    root = torch.tensor([eps], dtype=torch.float32).double().sqrt().float()
    assert_same_bits(rstd, root.double().reciprocal().float(), "rstd")


def test_rstd_eps_counts_in_fp32_not_in_fp64(norm, backend):
    # The three values are one FP32 number.
    batch = norm.batch(rows=5, n=64, seed=6)
    single = torch.tensor(1e-6).item()
    expected = norm.results(batch, backend)
    for eps in (single, single * (1 + 2.0**-30)):
        assert eps != 1e-6
        _, rstd = norm.forward(batch, backend, eps=eps)
        assert_same_bits(rstd, expected["rstd"], f"rstd with eps={eps}")


def test_rstd_order_of_a_row_is_that_of_its_columns(norm, backend):
    # Column order is part of the contract: a sum that ignored it would be another operator.
    batch = norm.batch(rows=64, n=256, seed=2)
    _, rstd = norm.forward(batch, backend)
    batch.inputs["x"] = batch.inputs["x"].flip(-1)
    _, flipped = norm.forward(batch, backend)
    assert not same_bits(flipped, rstd)
