# SPDX-License-Identifier: Apache-2.0
"""Faults planted into the CUDA source of layer_norm_modulate: the gates must be red."""

import pytest
import torch

from rlk.test_support.planted_source import KernelCopy
from rlk_qwenimage.layer_norm_modulate.operator import OPERATOR

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
    kernels.plant(
        "launch_cuda.cuh",
        "return vector_rows(t.data, t.token_stride",
        "return t.column_stride == 1 || vector_rows(t.data, t.token_stride",
    )
    green, _, output = kernels.run_gates("bfloat16", "layout")
    assert not green
    assert "misaligned address" in output


def test_bits_gate_product_and_shift_that_are_fused_are_red(kernels):
    kernels.plant(
        "device_cuda.cuh",
        "return add(multiply(xhat, factor), shift);",
        "return __fmaf_rn(xhat, factor, shift);",
    )
    green, red, output = kernels.run_gates(
        "float32", "forward_accuracy", "forward_invariance", "backend_equal"
    )
    assert not green
    assert red == {"backend_equal out"}, output


def test_accuracy_gates_scale_and_shift_that_are_swapped_are_red(kernels):
    for mine, other in (("scale", "shift"), ("shift", "scale")):
        kernels.plant(
            "launch_cuda.cuh",
            f"n.{mine} = {{a.{mine}, a.{mine}_stride_T, a.{mine}_stride_N}};",
            f"n.{mine} = {{a.{other}, a.{other}_stride_T, a.{other}_stride_N}};",
        )
    green, red, output = kernels.run_gates(
        "float32", "forward_accuracy", "gradient_accuracy", "backend_equal"
    )
    assert not green
    # Neither is read for statistics and sums.
    assert red == {
        "forward_accuracy out", "gradient_accuracy dx", "backend_equal out", "backend_equal dx"
    }, output  # fmt: skip


def test_order_gate_sums_that_lose_what_one_double_does_not_hold_are_red(kernels):
    # Of a block that has all tokens: the levels below the first.
    kernels.plant(
        "token_sums.cuh", "const bool deep = found.is_deep();", "const bool deep = false;"
    )
    green, red, output = kernels.run_gates("float32", "order_free", "backend_equal")
    assert not green
    assert red == {"backend_equal dscale", "backend_equal dshift"}, output


def test_order_gate_samples_that_get_the_sums_of_the_first_are_red(kernels):
    # Of samples whose sums several blocks add to.
    kernels.plant("part_sums.cuh", "joint.at(of, 0, sum, place);", "joint.at(0, 0, sum, place);")
    green, red, output = kernels.run_gates("float32", "gradient_accuracy", "backend_equal")
    assert not green
    assert red == {"backend_equal dscale", "backend_equal dshift"}, output
