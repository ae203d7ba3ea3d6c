# SPDX-License-Identifier: Apache-2.0
"""Importing the package is quick, and needs neither Triton nor a GPU."""

import rlk_rope
from rlk.test_support.fresh_process import (
    assert_nothing_optional,
    modules_of_import,
    printed_without_gpu,
)

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch, rlk_rope
from rlk import errors
x = torch.tensor([[[[1.0, 2.0]]]], requires_grad=True)
cos, sin = torch.zeros(1, 1), torch.ones(1, 1)
y = rlk_rope.multi_axis_rope(x, cos, sin)
y.backward(torch.tensor([[[[3.0, 5.0]]]]))
print(y.tolist(), x.grad.tolist())
try:
    rlk_rope.multi_axis_rope(x, cos, sin, backend="triton")
except errors.BackendError as error:
    print(error)
"""


def test_import_of_the_package_brings_no_optional_or_heavy_package():
    imported = modules_of_import(rlk_rope)
    assert "rlk_rope.multi_axis_rope" in imported
    assert_nothing_optional(imported, "diffusers", "transformers")


def test_import_without_triton_and_gpu_turns_and_turns_back_on_the_cpu():
    assert printed_without_gpu(WITHOUT_TRITON, rlk_rope) == [
        "[[[[-2.0, 1.0]]]] [[[[5.0, -3.0]]]]",
        'multi_axis_rope: backend "triton" cannot run here: it needs the package triton, '
        "which is not installed",
    ]
