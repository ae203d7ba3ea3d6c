# SPDX-License-Identifier: Apache-2.0
"""A tiny operator with a CUDA source, in a package of its own."""

import shutil
from pathlib import Path

import pytest

from rlk.cuda import build, header, toolchain
from rlk.operator import FLOATS, Operator, Reduction, Scalar, Tensor, Workload

DEMO = Operator(
    name="demo", package="rlk_test", bits_version=1, formula="y = x * weight + shift",
    inputs=(
        Tensor("x", ("...", "N"), FLOATS, gradient="row"),
        Tensor("weight", ("N",), ("=x", "float32"), gradient="parameter"),
    ),
    scalars=(Scalar("shift", 0.0), Scalar("mode", "plain", choices=("plain", "negated"))),
    outputs=(Tensor("y", ("...", "N"), ("=x",)),),
    saved=(Tensor("first", ("...",), ("float32",)),),
    reductions=(Reduction("dweight", "exact_sum", "T"),),
    category="elementwise", claims=(), workloads=(Workload("nowhere", {"T": 4, "N": 8}),),
    oracle=lambda x, weight, *, shift, mode: (x * weight + shift,), backends=(),
)  # fmt: skip

SOURCE = """// SPDX-License-Identifier: Apache-2.0
#include "rlk_demo.h"

#include "demo/device.cuh"

__global__ void forward(DemoForward a) {
    const float* x = static_cast<const float*>(a.x);
    const float* weight = static_cast<const float*>(a.weight);
    float* y = static_cast<float*>(a.y);
    const long long at = blockIdx.x * 256ll + threadIdx.x;
    if (at >= a.T * a.N) return;
    const long long row = at / a.N, column = at % a.N;
    const float value = x[row * a.x_stride_T + column * a.x_stride_N];
    y[at] = step(value, weight[column * a.weight_stride_N], a.shift);
    if (column == 0) static_cast<float*>(a.first)[row] = value;
}

RLK_EXPORT int rlk_demo_forward(const DemoForward* a) {
    rlk::DeviceGuard guard(a->device);
    if (guard.error() != cudaSuccess) return guard.error();
    if (a->mode == MODE_NEGATED) return cudaErrorInvalidValue;
    forward<<<(a->T * a->N + 255) / 256, 256, 0, static_cast<cudaStream_t>(a->stream)>>>(*a);
    return cudaGetLastError();
}
RLK_EXPORT int rlk_demo_backward(const DemoBackward* a) { return cudaErrorInvalidValue; }
RLK_EXPORT long long rlk_demo_backward_workspace(const DemoBackward* a) { return a->T; }
"""
DEVICE = """// SPDX-License-Identifier: Apache-2.0
#pragma once
__device__ inline float step(float x, float weight, float shift) {
    return __fadd_rn(__fmul_rn(x, weight), shift);
}
"""


@pytest.fixture(scope="session")
def needs_nvcc():
    """Skips where nothing can be compiled."""
    if toolchain.nvcc_missing() is not None or shutil.which("g++") is None:
        pytest.skip("needs nvcc")


@pytest.fixture
def source(tmp_path):
    """The demo's source: rlk_test/demo/kernel_cuda.cu, which includes demo/device.cuh."""
    return write_source(tmp_path / "sources")


def write_source(root: Path) -> Path:
    """The demo's package below `root`."""
    folder = root / "rlk_test"
    (folder / "demo").mkdir(parents=True)
    (root / "demo").mkdir()
    (folder / "__init__.py").touch()
    (folder / "demo" / "__init__.py").touch()
    (root / "demo" / "device.cuh").write_text(DEVICE)
    path = folder / "demo" / "kernel_cuda.cu"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of this test."""
    folder = tmp_path / "cache of a test"
    monkeypatch.setenv(build.CACHE_VARIABLE, str(folder))
    return folder


@pytest.fixture(scope="session")
def demo():
    """The declaration of the demo."""
    return DEMO


@pytest.fixture
def nvcc_script(tmp_path, monkeypatch, needs_nvcc):
    """Puts a shell script in the place of nvcc; its compilations append a line to `log`."""
    real = toolchain.nvcc("test")
    log = tmp_path / "compilations"

    def use(before: str) -> Path:
        script = tmp_path / "toolkit" / "bin" / "nvcc"
        script.parent.mkdir(parents=True)
        condition = f'case " $* " in *" -c "*) echo compiled >> {log}\n{before}\n;; esac'
        script.write_text(f'#!/bin/sh\n{condition}\nexec {real} "$@"\n')
        script.chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
        return log

    return use


@pytest.fixture
def generated():
    """The headers that the demo's source includes and no file holds."""
    return {header.header_name(DEMO): header.header(DEMO)}


@pytest.fixture
def warm(built, cache):
    """The entry of the demo, in a cache of this test."""
    shutil.copytree(built.parent, cache / built.parent.name)
    return cache / built.parent.name / built.name


@pytest.fixture(scope="session")
def built(needs_nvcc, tmp_path_factory):
    """One compiled entry of the demo, to copy from."""
    folder = tmp_path_factory.mktemp("built")
    path = write_source(folder / "sources")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(build.CACHE_VARIABLE, str(folder / "cache"))
        return build.build(path, "demo", {"rlk_demo.h": header.header(DEMO)}, "sm_90")
