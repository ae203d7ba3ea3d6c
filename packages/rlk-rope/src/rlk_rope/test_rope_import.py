# SPDX-License-Identifier: Apache-2.0
"""Importing the package is quick, and needs neither Triton nor a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import rlk
import rlk_rope

HEAVY = {"triton", "typer", "rich", "msgspec", "pytest", "diffusers", "transformers"}
IMPORT = """
import json, sys, torch
before = set(sys.modules)
import rlk_rope
print(json.dumps(sorted(set(sys.modules) - before)))
"""
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


def run(program):
    """What a fresh process without a GPU prints."""
    folders = [str(Path(module.__file__).parents[1]) for module in (rlk, rlk_rope)]
    path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    settings = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    settings.pop("TRITON_INTERPRET", None)
    finished = subprocess.run(
        [sys.executable, "-c", program], env=settings, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()


def test_import_of_the_package_brings_no_optional_or_heavy_package():
    imported = json.loads(*run(IMPORT))
    assert "rlk_rope.multi_axis_rope" in imported
    assert {name.split(".")[0] for name in imported} & HEAVY == set()
    assert [name for name in imported if "kernel" in name or name.startswith("rlk.cli")] == []


def test_import_without_triton_and_gpu_turns_and_turns_back_on_the_cpu():
    assert run(WITHOUT_TRITON) == [
        "[[[[-2.0, 1.0]]]] [[[[5.0, -3.0]]]]",
        'multi_axis_rope: backend "triton" cannot run here: it needs the package triton, '
        "which is not installed",
    ]
