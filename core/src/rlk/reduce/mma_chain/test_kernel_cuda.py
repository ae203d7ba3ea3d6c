# SPDX-License-Identifier: Apache-2.0
"""Which kernel of the CUDA backend a product gets: what a machine without a GPU can show."""

from types import SimpleNamespace

import pytest
import torch

from rlk.cuda import steps as steps_module
from rlk.errors import BackendError
from rlk.reduce.mma_chain import kernel_cuda, tiles, wgmma_header
from rlk.reduce.mma_chain.hard_cases import LAYOUTS
from rlk.reduce.mma_chain.operands import operand

STREAM = 4096
HOPPER, AMPERE, BLACKWELL = (9, 0), (8, 0), (10, 0)
(PRODUCT,) = kernel_cuda.steps.entries.values()
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture
def calls(monkeypatch):
    """The structs that launchers are given; they compute nothing. The GPU is Hopper."""
    given = []

    def call(packed):
        names = [field for _, field in PRODUCT.fields]
        given.append(
            SimpleNamespace(**dict(zip(names, PRODUCT.packer.unpack(packed), strict=True)))
        )
        return 0

    binary = SimpleNamespace(
        function=lambda name, arguments: call, digest="", check=lambda status, what: None
    )
    monkeypatch.setattr(steps_module, "binary_for", lambda *arguments: binary)
    monkeypatch.setattr(kernel_cuda.steps, "_loaded", {})
    monkeypatch.setattr(kernel_cuda, "current_stream", lambda device: STREAM)
    monkeypatch.setattr(kernel_cuda, "device_capability", lambda device: HOPPER)
    return given


def zeros(rows, k, layout="k_major", dtype=BF16):
    """[rows, K]; memory of its own begins at a multiple of 16 bytes."""
    return LAYOUTS[layout](torch.zeros(rows, k, dtype=dtype))


def kernel(call):
    """The kernel that a call names, or None for mma.sync."""
    return None if call.wgmma < 0 else tiles.WGMMA_KERNELS[call.wgmma]


@pytest.mark.parametrize("reads", [(x, y) for x in (True, False) for y in (True, False)], ids=str)
def test_table_every_size_finds_a_tile_whose_kernel_is_compiled(reads) -> None:
    sizes = (1, 2, 16, 17, 64, 65, 256, 257, 1024, 4096, 8193, 18432)
    found = {tiles.choose_wgmma(m, n, 64, reads) for m in sizes for n in sizes}
    assert found <= set(tiles.wgmma_candidates(reads))
    for tile in tiles.wgmma_candidates(reads):
        assert tiles.wgmma_kernel(tile, reads) in tiles.WGMMA_KERNELS
        assert tile.cluster is not None
        assert tile.swap == (reads == (False, True))


def test_table_kernels_are_listed_once_and_fit_a_multiprocessor() -> None:
    assert len(set(tiles.WGMMA_KERNELS)) == len(tiles.WGMMA_KERNELS)
    for one in tiles.WGMMA_KERNELS:
        stage = (one.m + one.n) * 64 * 2
        # 227 KB of shared memory in a block; at least two stages, one loading and one in use.
        assert 2 <= one.stages <= 227 * 1024 // stage
        # 232 registers of a consuming thread, 504 of three warpgroups: accumulators are FP32.
        rows = one.m if one.turns else one.m // one.warpgroups
        assert rows * one.n // 128 <= 192
        # A cluster of more blocks than 8 may fit nowhere.
        assert one.cluster[0] * one.cluster[1] <= 8


def test_header_has_every_kernel_by_number_and_wgmma_of_every_width() -> None:
    text = wgmma_header.header()
    for number, one in enumerate(tiles.WGMMA_KERNELS):
        assert f"    X({number}, " in text
        for kind in ("bf16", "f16"):
            assert f"m64n{one.n}k16.f32.{kind}.{kind} {{%0, " in text
    first = tiles.WgmmaKernel((True, False), 64, 32, 1, 16, False, (4, 1))
    assert "    X(0, true, false, 64, 32, 1, 16, false, 4, 1) \\\n" in wgmma_header.header([first])
    # 16 accumulators of a thread, then both descriptors.
    assert "%14, %15}, %16, %17, more, 1, 1, %19, %20;" in wgmma_header.header([first])


@pytest.mark.parametrize(("layouts", "reads"), [
    (("k_major", "k_major"), (True, True)),
    (("k_major", "row_major"), (True, False)),
    (("row_major", "row_major"), (False, False)),
    (("k_major_padded", "row_major_padded"), (True, False)),
])  # fmt: skip
@pytest.mark.parametrize("m", [1, 8, 64, 72, 264])
def test_product_of_operands_that_tma_reads_is_by_wgmma(calls, layouts, reads, m) -> None:
    a, b = (zeros(rows, 40, layout) for rows, layout in zip((m, 48), layouts, strict=True))
    # One row without gaps lies along K, however it was made.
    reads = (reads[0] or m == 1, reads[1])
    c = kernel_cuda.product(a, b, None, None, BF16)
    (call,) = calls
    assert kernel(call) == tiles.wgmma_kernel(tiles.choose_wgmma(m, 48, 40, reads), reads)
    assert (call.a, call.b, call.out) == (a.data_ptr(), b.data_ptr(), c.data_ptr())
    assert (call.M, call.N, call.K, call.swap) == (m, 48, 40, 0)
    assert (call.a_stride_m, call.a_stride_k) == a.stride()
    # What serves if the binary has no code for sm_90a.
    sync = tiles.choose_cuda(m, 48, 40)
    assert (call.tile_m, call.tile_n) == (sync.m, sync.n)


def test_product_of_a_along_rows_and_b_along_k_is_turned_over(calls) -> None:
    kernel_cuda.product(zeros(264, 40, "row_major"), zeros(48, 40), None, None, FP32)
    (call,) = calls
    assert call.swap == 1
    # The rows of the tile are the 48 of b.
    assert kernel(call) == tiles.wgmma_kernel(
        tiles.choose_wgmma(48, 264, 40, (True, False)), (True, False)
    )


@pytest.mark.parametrize("k", [0, 1])
def test_product_of_few_k_takes_wgmma_only_if_there_is_a_step(calls, k) -> None:
    # The gradient of a weight by one sample: [N, 1] and [K, 1], rows contiguous.
    a, b = (torch.zeros(k, rows, dtype=BF16).t() for rows in (48, 40))
    kernel_cuda.product(a, b, None, None, BF16)
    assert (kernel(calls[0]) is None) == (k == 0)


@pytest.mark.parametrize("capability", [AMPERE, BLACKWELL])
def test_product_on_other_gpus_is_by_mma_sync(calls, monkeypatch, capability) -> None:
    monkeypatch.setattr(kernel_cuda, "device_capability", lambda device: capability)
    a = zeros(24, 40)
    kernel_cuda.product(a, a, None, None, BF16)
    assert kernel(calls[0]) is None
    assert all(tile.cluster is None for tile in kernel_cuda.candidates(a, a))


@pytest.mark.parametrize(("layout", "dtype"), [
    ("unaligned", BF16), ("every_second", BF16), ("k_major", FP32),
])  # fmt: skip
def test_product_of_what_tma_or_wgmma_cannot_read_is_by_mma_sync(calls, layout, dtype) -> None:
    a, b = zeros(24, 40, layout, dtype), zeros(48, 40, "k_major", dtype)
    for pair in ((a, b), (b, a)):
        kernel_cuda.product(*pair, None, None, dtype)
        assert all(tile.cluster is None for tile in kernel_cuda.candidates(*pair))
    assert [kernel(call) for call in calls] == [None, None]


def test_plan_looks_at_where_operands_lie_in_every_call(calls) -> None:
    a, b = zeros(24, 40), zeros(48, 40)
    plan = kernel_cuda.plan_product(a, b, None, None, BF16)
    for shift_a, shift_b in ((0, 0), (2, 0), (0, 8), (16, 32)):
        plan(a.data_ptr() + shift_a, b.data_ptr() + shift_b)
    assert [kernel(call) is None for call in calls] == [False, True, True, False]
    assert {(call.tile_m, call.tile_n) for call in calls} == {(64, 64)}


def test_candidates_of_wgmma_follow_those_of_mma_sync_and_each_is_launched(calls) -> None:
    for layouts in (("k_major", "k_major"), ("k_major", "row_major"), ("row_major", "k_major")):
        a, b = (zeros(24, 40, layout) for layout in layouts)
        listed = kernel_cuda.candidates(a, b)
        assert listed[0].cluster is None
        assert sum(tile.cluster is not None for tile in listed) >= 4
        calls.clear()
        for tile in listed:
            kernel_cuda.product(a, b, None, None, BF16, tile)
        assert [kernel(call) is None for call in calls] == [t.cluster is None for t in listed]
        assert len({(c.tile_m, c.tile_n, c.wgmma, c.swap) for c in calls}) == len(listed)


def test_product_by_a_tile_of_other_operands_is_refused(calls) -> None:
    a, b = zeros(24, 40), zeros(48, 40, "row_major")
    with pytest.raises(BackendError, match="tile must be one of operands along K and rows, got"):
        kernel_cuda.product(a, b, None, None, BF16, tiles.CUDA_HOPPER[tiles.FORWARD][0].tile)


@pytest.mark.parametrize(("tensor", "fits"), [
    (torch.zeros(24, 40, dtype=BF16), True),
    (torch.zeros(24, 41, dtype=BF16), False),
    (torch.zeros(24, 48, dtype=BF16)[:, :41], True),
    (torch.zeros(1, 41, dtype=BF16), True),
    (torch.zeros(1, 40, dtype=BF16).expand(24, 40), False),
    (torch.zeros(24, 0, dtype=BF16), False),
    (torch.zeros(0, 24, dtype=BF16), False),
], ids=lambda value: str(getattr(value, "shape", value)))  # fmt: skip
def test_operand_fits_tma_by_sizes_and_strides(tensor, fits) -> None:
    assert operand(tensor).fits == fits
