# SPDX-License-Identifier: Apache-2.0
"""Importing the norms is quick, and needs neither Triton nor a GPU nor the command line's tools."""

import rlk_qwen3next
from rlk.test_support.fresh_process import (
    assert_nothing_optional,
    modules_of_import,
    printed_without_gpu,
)

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch, rlk_qwen3next
from rlk import errors
assert not torch.cuda.is_available()
x = torch.tensor([[2.0, 2.0], [4.0, -4.0]], requires_grad=True)
norm = rlk_qwen3next.RMSNorm(2, eps=0.0)
y = norm(x)
y.sum().backward()
print(y.tolist(), x.grad.tolist(), norm.weight.grad.tolist())
try:
    rlk_qwen3next.rms_norm(x, norm.weight, backend="triton")
except errors.BackendError as error:
    print(error)
"""


def test_import_of_the_package_brings_no_optional_or_heavy_package():
    imported = modules_of_import(rlk_qwen3next)
    assert "rlk_qwen3next.rms_norm" in imported
    assert_nothing_optional(imported, "transformers")


def test_import_without_triton_and_gpu_trains_on_the_cpu():
    # By hand: rstd is 1/2 and 1/4.
    assert printed_without_gpu(WITHOUT_TRITON, rlk_qwen3next) == [
        "[[1.0, 1.0], [1.0, -1.0]] [[0.0, 0.0], [0.25, 0.25]] [2.0, 0.0]",
        'rms_norm: backend "triton" cannot run here: it needs the package triton, '
        "which is not installed",
    ]
