# SPDX-License-Identifier: Apache-2.0
"""The wgmma kernel for every GPU generation, compiled without a GPU: one shape of each kind."""

import re
import shutil

import pytest

from rlk.cuda import build, toolchain
from rlk.reduce.mma_chain import kernel_cuda, tiles, wgmma_header

SOURCE = """// SPDX-License-Identifier: Apache-2.0
#include "rlk_mma_chain.h"

#include "rlk/reduce/mma_chain/launch_wgmma.cuh"

int rlk_mma_chain_product(const MmaChainProduct* a) { return rlk::launch_wgmma<__half>(*a); }
"""
# Together and in turns, with and without a cluster, along K and along rows; few accumulators, so
# that it compiles soon.
SHAPES = (
    tiles.WgmmaKernel((True, True), 64, 16, 1, 4, False, (1, 1)),
    tiles.WgmmaKernel((True, False), 64, 32, 1, 4, False, (2, 2)),
    tiles.WgmmaKernel((False, False), 64, 64, 2, 4, True, (1, 2)),
)
# 32: launch_wgmma.cuh takes a kernel with fewer registers for an empty one.
LEAST_REGISTERS = 32


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compiles for an architecture."""
    if toolchain.nvcc_missing() is not None or shutil.which("g++") is None:
        pytest.skip("needs nvcc")
    source = tmp_path_factory.mktemp("sources") / "kernel_cuda.cu"
    source.write_text(SOURCE)
    generated = {**kernel_cuda.steps.generated, wgmma_header.HEADER: wgmma_header.header(SHAPES)}
    return lambda arch: build.compile_only(source, "mma_chain", generated, arch)


def test_hopper_code_has_every_shape_and_no_spills(compiled) -> None:
    made = compiled("sm_90")
    kernels = {name: r for name, r in made.resources.items() if "chain_wgmma" in name}
    assert len(kernels) == len(SHAPES)
    assert {r.spill_stores + r.spill_loads for r in kernels.values()} == {0}
    assert min(r.registers for r in kernels.values()) >= LEAST_REGISTERS
    # C7515 and its neighbours: ptxas lets wgmma run one by one.
    assert "(C75" not in made.log
    steps = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)[^;]*, (\S+);", made.ptx)
    assert {kind for kind, _ in steps} == {f"m64n{one.n}k16.f32.f16.f16" for one in SHAPES}
    # Neither operand is negated; the last two say whether one has its rows contiguous.
    ends = set(re.findall(r"wgmma\.mma_async[^;]*, (\S+, \S+), (\S+, \S+);", made.ptx))
    assert ends == {("1, 1", "0, 0"), ("1, 1", "0, 1"), ("1, 1", "1, 1")}


@pytest.mark.parametrize("arch", [a for a in toolchain.ARCHITECTURES if a != "sm_90"])
def test_other_generations_have_empty_kernels_that_the_launcher_knows(compiled, arch) -> None:
    made = compiled(arch)
    kernels = [r for name, r in made.resources.items() if "chain_wgmma" in name]
    assert len(kernels) == len(SHAPES)
    assert "wgmma.mma_async" not in made.ptx
    assert max(r.registers for r in kernels) < LEAST_REGISTERS
