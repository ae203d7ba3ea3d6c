# SPDX-License-Identifier: Apache-2.0
"""Faults planted into the CUDA source of a rotary embedding: the gates must be red."""

import pytest
import torch

from rlk.test_support.planted_source import KernelCopy
from rlk_rope.multi_axis_rope.operator import OPERATOR

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture
def kernels(tmp_path):
    return KernelCopy(OPERATOR, tmp_path)


def test_layout_gate_alignment_that_is_ignored_is_red(kernels):
    green, _, output = kernels.run_gates("bfloat16", "layout")
    assert green, output
    kernels.plant("launch_cuda.cuh", "by_flag(in_words(a, kind.interleaved)", "by_flag(true")
    green, _, output = kernels.run_gates("bfloat16", "layout")
    assert not green
    assert "misaligned address" in output


def test_bits_gate_products_that_are_fused_are_red(kernels):
    kernels.plant("rotation.cuh", "first = __fsub_rn(ac, bs);", "first = __fmaf_rn(a, c, -bs);")
    green, red, output = kernels.run_gates(
        "float32", "forward_accuracy", "forward_invariance", "backend_equal"
    )
    assert not green
    assert red == {"backend_equal y"}, output


def test_gradient_gate_sine_that_is_never_toggled_is_red(kernels):
    kernels.plant("kernel_cuda.cu", "a->x_dtype, true,", "a->x_dtype, false,")
    green, red, output = kernels.run_gates(
        "float32", "forward_accuracy", "gradient_accuracy", "backend_equal", "repeatable"
    )
    assert not green
    assert red == {"gradient_accuracy dx", "backend_equal dx"}, output
