# SPDX-License-Identifier: Apache-2.0
"""The split of FP32, and the instructions that the kernels compile to."""

import os
import subprocess
import sys

import pytest
import torch

from rlk import interpreter
from rlk.compare import assert_same_bits

# Before anything imports triton.
interpreter.enable_without_gpu()
triton = pytest.importorskip("triton", reason="needs triton")

import triton.language as tl  # noqa: E402

from rlk.launch import launch_triton  # noqa: E402
from rlk.reduce.mma_chain.device_triton import split_tf32  # noqa: E402

DEVICE = "cpu" if interpreter.is_enabled() else "cuda"


@triton.jit
def split_kernel(x_ptr, hi_ptr, lo_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    hi, lo = split_tf32(tl.load(x_ptr + at))
    tl.store(hi_ptr + at, hi)
    tl.store(lo_ptr + at, lo)


def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.to(DEVICE)
    hi, lo = torch.empty_like(x), torch.empty_like(x)
    launch_triton(split_kernel, (1,), x, hi, lo, COUNT=len(x))
    return hi.cpu(), lo.cpu()


def test_split_any_finite_number_is_two_tf32_numbers_close_to_it() -> None:
    generator = torch.Generator().manual_seed(11)
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=generator).to(torch.int32)
    x = bits.view(torch.float32)
    x = torch.where(x.isfinite(), x, 1.0)
    hi, lo = split(x)
    for part in (hi, lo):
        assert not (part.view(torch.int32) & 0x1FFF).any()
        assert part.isfinite().all()
    # Half a step of hi and half a step of lo, 2^-11 each; 2^-136 is the smallest TF32 number.
    error = (x.double() - hi.double() - lo.double()).abs()
    assert (error <= 2.0**-22 * x.double().abs() + 2.0**-137).all()


def test_split_hand_picked_numbers_gives_hand_answers() -> None:
    largest = torch.finfo(torch.float32).max
    x, hi, lo = torch.tensor([
        (1.0, 1.0, 0.0),
        (-1.0, -1.0, 0.0),
        (0.0, 0.0, 0.0),
        (1 + 2.0**-11, 1.0, 2.0**-11),                      # a tie, to the even 1
        (1 + 3 * 2.0**-11, 1 + 2.0**-9, -(2.0**-11)),       # a tie, to the even one above
        (1 + 2.0**-23, 1.0, 2.0**-23),
        (largest, (2 - 2.0**-10) * 2.0**127, 2.0**117),     # not Inf; 8191 steps round to 8192
        (torch.inf, 0.0, torch.inf),
        (-torch.inf, 0.0, -torch.inf),
        (torch.nan, 0.0, torch.nan),
    ]).t().contiguous()  # fmt: skip
    found = split(torch.nn.functional.pad(x, (0, 6)))
    assert_same_bits(found[0][:10].contiguous(), hi)
    assert_same_bits(found[1][:10].contiguous(), lo)


# Compilation needs a process in which triton was imported without its interpreter.
COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rlk.reduce.mma_chain import kernel_triton as k

dtype, rows, block = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
names = k.chain_tma_kernel.arg_names
constants = dict(
    A_K_MAJOR=True, B_K_MAJOR=True, SWAPPED=False, BIAS=1, HAS_INITIAL=False, BM=rows, BN=64,
    BN2=0, BK=block, GROUP=8, PERSISTENT=False, out_stride_n=1, initial_stride_n=1, bias_stride=1,
)
signature = dict.fromkeys(names, "i32")
signature |= dict.fromkeys(("b_desc", "b2_desc"), f"tensordesc<{dtype}[64, {block}]>")
signature |= dict(a_desc=f"tensordesc<{dtype}[{rows}, {block}]>")
signature |= dict(out_ptr="*" + dtype, bias_ptr="*fp32", initial_ptr="*fp32")
signature |= dict.fromkeys(constants, "constexpr")
source = ASTSource(k.chain_tma_kernel, signature, constants)
options = {"enable_fp_fusion": False, "num_warps": 4, "num_stages": 3}
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""
# dtype, rows of the tile, block of K, instruction, additions an accumulator beside the MMA: zero
# and bias, for FP32 also that of a block.
COMPILED = (
    ("bf16", 64, 16, "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", 2),
    ("fp32", 64, 32, "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32", 3),
    ("fp32", 32, 32, "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", 3),
)


@pytest.mark.parametrize(("dtype", "rows", "block", "instruction", "additions"), COMPILED)
def test_kernel_compiled_adds_block_zero_and_bias_outside_of_the_mma(
    dtype, rows, block, instruction, additions
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    ptx = subprocess.run(
        [sys.executable, "-c", COMPILE, dtype, str(rows), str(block)], env=environment,
        check=True, stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip
    assert instruction in ptx
    assert "cp.async.bulk.tensor.2d" in ptx
    # rows x 64 accumulators in 128 threads.
    assert ptx.count("add.rn.f32") == additions * rows * 64 // 128
