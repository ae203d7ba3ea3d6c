# SPDX-License-Identifier: Apache-2.0
"""Faults that need parallel hardware, planted into the Triton backend: the gates must be red."""

from dataclasses import replace

import pytest
import torch

from rlk import backends, interpreter
from rlk.reduce import exact_sum
from rlk.test_support.planted_source import KernelCopy
from rlk.test_support.sabotage import Fault, red
from rlk_qwen3next.rms_norm.operator import OPERATOR

interpreter.enable_without_gpu()
triton = pytest.importorskip("triton", reason="needs triton")

import triton.language as tl  # noqa: E402

from rlk.launch import launch_triton  # noqa: E402
from rlk_qwen3next.rms_norm import kernel_triton  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

# 40: a tuned kernel's idea of a small batch; agreement with golden is judged on 33 rows too.
SMALL_BATCH = 40


@triton.jit
def fold_with_atomics(c_ptr, sum_ptr, n, BLOCK: tl.constexpr):
    """One row, added to the FP32 sums of all rows in whatever order the hardware takes."""
    for start in range(0, n, BLOCK):
        column = start + tl.arange(0, BLOCK)
        c = tl.load(c_ptr + tl.program_id(0) * n + column, mask=column < n, other=0.0)
        tl.atomic_add(sum_ptr + column, c, mask=column < n)


@triton.jit
def square_sum_in_blocks(x_ptr, sum_ptr, n, BLOCK: tl.constexpr):
    """The sum of squares of one contiguous row, BLOCK partial sums side by side."""
    row = tl.program_id(0)
    partial = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n + column, mask=column < n, other=0.0).to(tl.float32)
        partial = partial + x * x
    tl.store(sum_ptr + row, tl.sum(partial))


class AtomicWeightGradient:
    """dweight in FP32 by atomics, everything else as it should be."""

    forward = staticmethod(kernel_triton.forward)

    @staticmethod
    def backward(dy, x, weight, rstd, *, needs, **scalars):
        dx, state = kernel_triton.backward(dy, x, weight, rstd, needs=needs, **scalars)
        if state is None:
            return dx, None
        terms = (dy.float() * (x.float() * rstd[:, None])).contiguous()
        sums = terms.new_zeros(terms.shape[1])
        launch_triton(fold_with_atomics, (len(terms),), terms, sums, len(sums), BLOCK=128)
        empty = exact_sum.new(len(sums), sums.device)
        return dx, exact_sum.add_rows(empty, sums[None], backend="triton")


class BlockFromRowCount:
    """rstd by blocks of 64 where there are few rows, for more parallelism."""

    backward = staticmethod(kernel_triton.backward)

    @staticmethod
    def forward(x, weight, *, eps, weight_offset, rounding):
        scalars = {"eps": eps, "weight_offset": weight_offset, "rounding": rounding}
        y, rstd = kernel_triton.forward(x, weight, **scalars)
        if len(x) >= SMALL_BATCH:
            return y, rstd
        rows, n = x.contiguous(), x.shape[1]
        sums = torch.empty_like(rstd)
        launch_triton(square_sum_in_blocks, (len(rows),), rows, sums, n, BLOCK=64)
        rstd = 1 / torch.sqrt(sums / n + eps)
        factor = weight.float() + weight_offset if weight_offset else weight.float()
        return (rows.float() * rstd[:, None] * factor).to(x.dtype), rstd


def plant(module):
    """The operator with `module` as its Triton backend, and golden to compare with."""
    golden = OPERATOR.backend("golden")
    return replace(OPERATOR, backends=(backends.triton(lambda: module), golden))


ORDER = ("gradient_invariance", "order_free", "backend_equal")
FAULTS = [
    # Rounding errors of an FP32 sum are within the contract: accuracy must stay green.
    Fault(
        "dweight_with_fp32_atomics",
        plant(AtomicWeightGradient),
        dict.fromkeys(ORDER, "dweight"),
    ),
    Fault(
        "block_size_from_row_count",
        plant(BlockFromRowCount),
        {
            "forward_invariance": "y rstd",
            "gradient_invariance": "dx dweight",
            "order_free": "dweight",
            "backend_equal": "y rstd dx dweight",
        },
    ),
]
# Where the order of atomics may differ from one run to the next, and then must be red.
CHANCE = {("repeatable", "dweight"), ("layout", "dweight")}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_gates_planted_fault_turn_exactly_its_records_red(fault):
    found = red(fault.records())
    chance = CHANCE if fault.name == "dweight_with_fp32_atomics" else set()
    assert fault.expected <= found <= fault.expected | chance


def test_layout_gate_alignment_that_is_ignored_is_red(tmp_path):
    """Rows that begin at any address, read by 16-byte words."""
    kernels = KernelCopy(OPERATOR, tmp_path)
    green, _, output = kernels.run_gates("bfloat16", "layout")
    assert green, output
    kernels.plant("launch_cuda.cuh", "vector_rows(", "true || vector_rows(", places=3)
    green, _, output = kernels.run_gates("bfloat16", "layout")
    assert not green
    assert "misaligned address" in output
