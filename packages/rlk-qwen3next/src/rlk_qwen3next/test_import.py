# SPDX-License-Identifier: Apache-2.0
"""Importing the norms is quick, and needs neither Triton nor a GPU nor the command line's tools."""

import json
import os
import subprocess
import sys
from pathlib import Path

import rlk
import rlk_qwen3next

HEAVY = {"triton", "typer", "rich", "msgspec", "pytest", "transformers"}
IMPORT = """
import json, sys, torch
before = set(sys.modules)
import rlk_qwen3next
print(json.dumps(sorted(set(sys.modules) - before)))
"""
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


def run(program):
    """What a fresh process without a GPU prints."""
    folders = [str(Path(module.__file__).parents[1]) for module in (rlk, rlk_qwen3next)]
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
    assert "rlk_qwen3next.rms_norm" in imported
    assert {name.split(".")[0] for name in imported} & HEAVY == set()
    assert [name for name in imported if "kernel" in name or name.startswith("rlk.cli")] == []


def test_import_without_triton_and_gpu_trains_on_the_cpu():
    # By hand: rstd is 1/2 and 1/4.
    assert run(WITHOUT_TRITON) == [
        "[[1.0, 1.0], [1.0, -1.0]] [[0.0, 0.0], [0.25, 0.25]] [2.0, 0.0]",
        'rms_norm: backend "triton" cannot run here: it needs the package triton, '
        "which is not installed",
    ]
