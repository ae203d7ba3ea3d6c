# SPDX-License-Identifier: Apache-2.0
"""The CUDA lane and tree, looped over chunks as operators do, give the bytes of golden."""

import ctypes
from pathlib import Path

import pytest
import torch

from rlk.compare import assert_same_bits
from rlk.cuda import build, toolchain
from rlk.cuda.header import Layout, library_header
from rlk.cuda.launch import binary_for
from rlk.reduce.row_sum import golden, hard_cases

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
LAYOUT = Layout(
    "RowSumTestDot",
    (
        ("const void*", "a"),
        ("const void*", "b"),
        ("void*", "y"),
        ("long long", "rows"),
        ("long long", "columns"),
        ("void*", "stream"),
        ("int", "lanes"),
        ("int", "device"),
    ),
)
GENERATED = {"rlk_row_sum_test.h": library_header("row_sum_test", (("dot", LAYOUT),))}
SOURCE = Path(__file__).with_name("test_kernels.cu")
# 4096: many blocks, a row count that no block size shows in.
MANY_ROWS = 4096


def in_cuda(a: torch.Tensor, b: torch.Tensor | None, lanes: int) -> torch.Tensor:
    """Dot products of rows, or sums without b, a row by `lanes` threads."""
    device = torch.cuda.current_device()
    library = binary_for("row_sum_test", SOURCE, GENERATED, device)
    launch = library.function("rlk_row_sum_test_dot", [ctypes.c_char_p])
    a, b, y = a.cuda(), None if b is None else b.cuda(), torch.empty(len(a), device="cuda")
    stream = torch.cuda.current_stream(device).cuda_stream
    pointers = (a.data_ptr(), 0 if b is None else b.data_ptr(), y.data_ptr())
    packed = LAYOUT.packer.pack(*pointers, *a.shape, stream, lanes, device)
    library.check(launch(packed), "dot")
    return y.cpu()


def lane_counts(length: int) -> list[int]:
    """The numbers of lanes that hold a row of this length in one step."""
    return [n for n in (8, 16) if length <= n * golden.LANE_TERMS] + [32]


def test_kernel_of_this_test_compiles_without_a_gpu() -> None:
    if toolchain.nvcc_missing() is not None:
        pytest.skip("needs nvcc")
    ptx = build.compile_only(SOURCE, "row_sum_test", GENERATED, "sm_90").ptx
    assert "shfl.sync.bfly.b32" in ptx


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("length", hard_cases.LENGTHS)
def test_dot_hard_rows_equals_golden(length: int) -> None:
    a, b = hard_cases.rows(length), hard_cases.rows(length, seed=1)
    for lanes in lane_counts(length):
        assert_same_bits(in_cuda(a, b, lanes), golden.row_dot(a, b), f"{lanes} lanes")
        assert_same_bits(in_cuda(a, None, lanes), golden.row_sum(a), f"sum, {lanes} lanes")


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("length", [1, 63, 64, 127, 255, 257, 511])
def test_dot_many_rows_equals_golden(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    scale = torch.randint(-20, 21, (MANY_ROWS, length), generator=generator).float().exp2()
    a, b = (torch.randn(MANY_ROWS, length, generator=generator) * scale for _ in range(2))
    for lanes in lane_counts(length):
        assert_same_bits(in_cuda(a, b, lanes), golden.row_dot(a, b), f"{lanes} lanes")


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("name", hard_cases.known_sums())
def test_dot_known_row_gives_known_sum(name: str) -> None:
    terms, expected = hard_cases.known_sums()[name]
    for lanes in lane_counts(terms.shape[1]):
        actual = in_cuda(terms, torch.ones_like(terms), lanes)
        assert_same_bits(actual, torch.tensor([expected]), f"{lanes} lanes")
        alone = in_cuda(terms, None, lanes)
        assert_same_bits(alone, torch.tensor([expected]), f"sum, {lanes} lanes")
