# SPDX-License-Identifier: Apache-2.0
"""Compiles device code for the CPU, so that tests without a GPU run it."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What device code includes of CUDA, and of ours that hold no device code.
REPLACED = (
    "cuda_bf16.h",
    "cuda_fp16.h",
    "cuda_runtime.h",
    "rlk/cuda/launch.cuh",
)  # fmt: skip
FLAGS = ("-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-w", "-x", "c++")


def library(source: Path, folder: Path) -> ctypes.CDLL:
    """The functions that a source exports, compiled with on_host.h in CUDA's place."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    for name in REPLACED:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('#include "rlk/test_support/on_host.h"\n')
    made = folder / "on_host.so"
    command = [compiler, *FLAGS, f"-I{folder}", f"-I{ROOT}", "-o", str(made), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return ctypes.CDLL(str(made))
