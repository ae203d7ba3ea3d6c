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
    "cuda_pipeline.h",
    "cuda_runtime.h",
    "rlk/cuda/launch.cuh",
    "rlk/cuda/shared.cuh",
)  # fmt: skip
# Without aliasing rules: device code moves elements of any dtype as words.
FLAGS = (
    "-std=c++20", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC", "-w",
    "-x", "c++",
)  # fmt: skip


def library(source: Path, folder: Path, *roots: Path) -> ctypes.CDLL:
    """The functions that a source exports, compiled with on_host.h in CUDA's place.

    Args:
        source: the .cu file.
        folder: for the library.
        roots: beside core's, folders that includes begin from.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    for name in REPLACED:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('#include "rlk/test_support/on_host.h"\n')
    made = folder / "on_host.so"
    includes = [f"-I{root}" for root in (folder, ROOT, *roots)]
    command = [compiler, *FLAGS, *includes, "-o", str(made), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return ctypes.CDLL(str(made))
