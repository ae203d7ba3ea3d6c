# SPDX-License-Identifier: Apache-2.0
"""Faults planted into the CUDA source of layer_norm_modulate: the gates must be red."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rlk_qwenimage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

# A wrong address ends what a process can do with its GPU: gates run in one of their own.
GATES = """
import sys
from dataclasses import replace
from pathlib import Path
from rlk import backends
from rlk.cuda.launch import KernelModule
from rlk.gates import cases, judge
from rlk_qwenimage.layer_norm_modulate.operator import OPERATOR
kernels = KernelModule(OPERATOR, Path(sys.argv[1]))
operator = replace(OPERATOR, backends=(backends.cuda(lambda: kernels), OPERATOR.backend("golden")))
for case in cases([operator], backend="cuda"):
    if case.dtype == sys.argv[2] and case.judgment in sys.argv[3:]:
        for record in judge(case):
            print(record.status, case.judgment, record.tensor, record.reason)
"""


@pytest.fixture
def kernels(tmp_path):
    """A copy of the package; its folder of kernels."""
    package = Path(rlk_qwenimage.__file__).parent
    return shutil.copytree(package, tmp_path / package.name) / "layer_norm_modulate"


def plant(file: Path, right: str, wrong: str) -> None:
    """Replace the one place of a text."""
    text = file.read_text()
    assert text.count(right) == 1
    file.write_text(text.replace(right, wrong))


def run_gates(folder: Path, dtype: str, *judgments: str) -> tuple[bool, set[str], str]:
    """Whether all is green, the red "judgment tensor" pairs, and all that was printed."""
    command = [sys.executable, "-c", GATES, str(folder / "kernel_cuda.cu"), dtype, *judgments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    lines = [line.split(" ") for line in done.stdout.splitlines()]
    red = {f"{line[1]} {line[2]}" for line in lines if line[0] == "failed"}
    green = done.returncode == 0 and {line[0] for line in lines} == {"passed"}
    return green, red, done.stdout + done.stderr


def test_layout_gate_alignment_that_is_ignored_is_red(kernels):
    green, _, output = run_gates(kernels, "bfloat16", "layout")
    assert green, output
    plant(
        kernels / "launch_cuda.cuh",
        "return vector_rows(t.data, t.token_stride",
        "return t.column_stride == 1 || vector_rows(t.data, t.token_stride",
    )
    green, _, output = run_gates(kernels, "bfloat16", "layout")
    assert not green
    assert "misaligned address" in output


def test_bits_gate_product_and_shift_that_are_fused_are_red(kernels):
    plant(
        kernels / "device_cuda.cuh",
        "return add(multiply(xhat, factor), shift);",
        "return __fmaf_rn(xhat, factor, shift);",
    )
    green, red, output = run_gates(
        kernels, "float32", "forward_accuracy", "forward_invariance", "backend_equal"
    )
    assert not green
    assert red == {"backend_equal out"}, output


def test_accuracy_gates_scale_and_shift_that_are_swapped_are_red(kernels):
    file = kernels / "launch_cuda.cuh"
    for mine, other in (("scale", "shift"), ("shift", "scale")):
        plant(
            file,
            f"n.{mine} = {{a.{mine}, a.{mine}_stride_T, a.{mine}_stride_N}};",
            f"n.{mine} = {{a.{other}, a.{other}_stride_T, a.{other}_stride_N}};",
        )
    green, red, output = run_gates(
        kernels, "float32", "forward_accuracy", "gradient_accuracy", "backend_equal"
    )
    assert not green
    # Neither is read for statistics and sums.
    assert red == {
        "forward_accuracy out", "gradient_accuracy dx", "backend_equal out", "backend_equal dx"
    }, output  # fmt: skip


def test_order_gate_sums_that_lose_what_one_double_does_not_hold_are_red(kernels):
    # Of a block that has all tokens: the levels below the first.
    plant(
        kernels / "token_sums.cuh",
        "const bool deep = sums.is_deep();",
        "const bool deep = false;",
    )
    green, red, output = run_gates(kernels, "float32", "order_free", "backend_equal")
    assert not green
    assert red == {"backend_equal dscale", "backend_equal dshift"}, output


def test_order_gate_blocks_that_add_to_one_sample_alone_are_red(kernels):
    plant(
        kernels / "kernel_backward.cuh",
        "const long long first = place * a.columns + slice;",
        "const long long first = slice;",
    )
    green, red, output = run_gates(kernels, "float32", "gradient_accuracy", "backend_equal")
    assert not green
    assert red == {"backend_equal dscale", "backend_equal dshift"}, output
