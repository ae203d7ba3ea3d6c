# SPDX-License-Identifier: Apache-2.0
"""Which tile shape serves which product: the only place, for speed alone. No bit depends on it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

# 32: of K, within which the three products of FP32 operands take turns; part of the order.
FP32_BLOCK = 32


@dataclass(frozen=True)
class Tile:
    """A block of the result, and how a program forms it.

    `m`, `n` and `k` are its sizes; `n2` is the width of a second accumulator beside the first, so
    that a tile may be 192 wide. `swap` makes the rows of b those of the tile: for few rows of a.
    `waves` is the number of programs a multiprocessor gets, each of which forms tile after tile; 0
    gives every tile a program of its own. `group` rows of tiles share the columns in the L2 cache.
    In CUDA `cluster` says that TMA and wgmma form the tile: this many tiles side by side and one
    below another share what they load. One warpgroup loads, by a warp for each operand, and one or
    two multiply; `turns` has two of them form a tile each, in turns.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    n2: int = 0
    swap: bool = False
    waves: int = 0
    group: int = 8
    cluster: tuple[int, int] | None = None
    turns: bool = False

    @property
    def width(self) -> int:
        """Columns of the tile."""
        return self.n + self.n2


@dataclass(frozen=True)
class Row:
    """A tile, and the largest product that it serves."""

    tile: Tile
    m: float = math.inf  # rows of a
    n: float = math.inf  # rows of b
    k: float = math.inf


@dataclass(frozen=True)
class Table:
    """Rows for BF16 and FP16, and for FP32: the first that is large enough serves."""

    narrow: tuple[Row, ...]
    fp32: tuple[Row, ...]

    def choose(self, m: int, n: int, k: int, *, fp32: bool) -> Tile:
        """The tile that serves a product [m, k] by [n, k]."""
        return _first(self.fp32 if fp32 else self.narrow, m, n, k)

    def candidates(self, *, fp32: bool) -> tuple[Tile, ...]:
        """Every tile that `choose` may return."""
        return tuple(dict.fromkeys(row.tile for row in (self.fp32 if fp32 else self.narrow)))


# Operands that TMA reads, on Hopper: up to 227 KB of shared memory. Measured on an H200 for weights
# [6144 | 18432, 3072]: their gradient has short chains, that of activations few columns.
FEW_COLUMNS = 4096
HOPPER = Table(
    narrow=(
        Row(Tile(64, 128, 16, 4, 2, waves=4), k=16),
        Row(Tile(64, 128, 64, 4, 2), k=64),
        Row(Tile(128, 128, 64, 8, 3, waves=1), k=128),
        Row(Tile(32, 8, 256, 2, 5, swap=True), m=8, n=FEW_COLUMNS),
        Row(Tile(64, 16, 256, 4, 4, swap=True), m=16),
        Row(Tile(64, 32, 128, 4, 6, swap=True), m=32),
        Row(Tile(64, 32, 128, 4, 6), m=64, n=FEW_COLUMNS),
        Row(Tile(64, 64, 128, 4, 5), m=64, n=8192),
        Row(Tile(64, 64, 128, 4, 4), m=128, n=FEW_COLUMNS),
        Row(Tile(64, 64, 128, 4, 4, n2=32), m=128),
        Row(Tile(64, 64, 128, 4, 4, n2=32), m=256, n=FEW_COLUMNS),
        Row(Tile(64, 128, 64, 4, 5, n2=64), m=256),
        Row(Tile(64, 128, 64, 4, 5, n2=64), m=512, n=FEW_COLUMNS),
        Row(Tile(128, 128, 64, 8, 4, n2=64), m=1024),
        Row(Tile(64, 256, 64, 4, 4), m=4096, n=FEW_COLUMNS),
        Row(Tile(128, 128, 64, 4, 3)),
    ),
    fp32=(
        Row(Tile(64, 16, FP32_BLOCK, 4, 6, swap=True), m=16),
        # 128 registers a thread, so that two of them run side by side.
        Row(Tile(128, 64, FP32_BLOCK, 8, 3), n=FEW_COLUMNS),
        Row(Tile(128, 128, FP32_BLOCK, 8, 3)),
    ),
)
# Any operands: at most the 99 KB of shared memory that the smallest GPUs have.
GENERAL = Table(
    narrow=(
        Row(Tile(32, 16, 128, 2, 4, swap=True), m=16),
        Row(Tile(64, 64, 64, 4, 4), m=256),
        Row(Tile(128, 128, 32, 8, 4)),
    ),
    fp32=(
        Row(Tile(32, 16, FP32_BLOCK, 2, 4, swap=True), m=16),
        Row(Tile(64, 64, FP32_BLOCK, 4, 3), m=256),
        Row(Tile(128, 64, FP32_BLOCK, 8, 3)),
    ),
)
# GPUs with tcgen05, to which Triton turns from 64 rows on: mma.sync alone, as in CUDA, since the
# two may add in another way.
TENSOR_MEMORY = Table(
    narrow=(
        Row(Tile(32, 16, 128, 2, 4, swap=True), m=16),
        Row(Tile(32, 128, 64, 4, 4)),
    ),
    fp32=(
        Row(Tile(32, 16, FP32_BLOCK, 2, 4, swap=True), m=16),
        Row(Tile(32, 64, FP32_BLOCK, 4, 3)),
    ),
)


def table_for(capability: tuple[int, int], *, by_tma: bool) -> Table:
    """The table of a GPU of this compute capability."""
    if capability[0] in (10, 11):
        return TENSOR_MEMORY
    return HOPPER if by_tma and capability[0] == 9 else GENERAL


# The shapes that kernel_cuda.cu has; their blocks of K and stages are written there.
CUDA = (
    Row(Tile(16, 32, 128, 4, 4), m=16),
    Row(Tile(64, 64, 64, 4, 4), m=256),
    Row(Tile(64, 64, 64, 4, 4), k=128),
    Row(Tile(128, 128, 64, 8, 3)),
)
# Whether a and b have K as their contiguous axis.
Reads = tuple[bool, bool]
FORWARD, ROW_GRADIENT, PARAMETER_GRADIENT = (True, True), (True, False), (False, False)
# BF16 and FP16 on Hopper, of operands that TMA reads: measured on an H200 for weights
# [6144 | 18432, 3072]. 144, 96 and 48: a wave of 128 tiles; clusters of four of these need two, for
# an H200 runs 30 at once. A row or a number changed here is all that changes: the kernels are
# generated from these rows.
CUDA_HOPPER: Mapping[Reads, tuple[Row, ...]] = {
    FORWARD: (
        Row(Tile(64, 48, 64, 8, 14, cluster=(1, 1)), m=64, n=8192),
        Row(Tile(64, 144, 64, 8, 8, cluster=(1, 1)), m=64),
        Row(Tile(128, 96, 64, 12, 7, cluster=(1, 1)), m=128),
        Row(Tile(128, 96, 64, 12, 7, cluster=(1, 2)), m=256, n=8192),
        Row(Tile(256, 144, 64, 12, 4, cluster=(1, 1)), m=256),
        Row(Tile(128, 192, 64, 12, 5, cluster=(1, 2), turns=True)),
    ),
    ROW_GRADIENT: (
        Row(Tile(64, 32, 64, 8, 16, cluster=(2, 1)), m=32, n=FEW_COLUMNS),
        Row(Tile(64, 32, 64, 8, 16, cluster=(1, 1)), m=64, n=FEW_COLUMNS, k=8192),
        Row(Tile(64, 32, 64, 8, 16, cluster=(2, 1)), m=64, n=FEW_COLUMNS),
        Row(Tile(64, 64, 64, 8, 12, cluster=(1, 1)), m=128),
        Row(Tile(64, 96, 64, 8, 9, cluster=(1, 2)), m=256),
        Row(Tile(128, 96, 64, 12, 7, cluster=(1, 2)), m=512),
        Row(Tile(128, 192, 64, 12, 5, cluster=(1, 2)), m=1024, n=FEW_COLUMNS),
        Row(Tile(128, 192, 64, 12, 5, cluster=(1, 2), turns=True)),
    ),
    PARAMETER_GRADIENT: (
        Row(Tile(128, 192, 64, 12, 5, group=2, cluster=(1, 1), turns=True), k=512),
        Row(Tile(128, 192, 64, 12, 5, group=2, cluster=(1, 2), turns=True)),
    ),
}


class WgmmaKernel(NamedTuple):
    """What is compiled for a tile of CUDA_HOPPER: it has no side that is swapped, and no group."""

    reads: Reads
    m: int
    n: int
    warpgroups: int  # that multiply
    stages: int
    turns: bool
    cluster: tuple[int, int]


def wgmma_kernel(tile: Tile, reads: Reads) -> WgmmaKernel:
    """The kernel that forms a tile of operands so read."""
    if tile.swap:
        reads = reads[::-1]
    return WgmmaKernel(
        reads, tile.m, tile.n, tile.warps // 4 - 1, tile.stages, tile.turns, tile.cluster or (1, 1)
    )


# In the order of their numbers.
WGMMA_KERNELS = tuple(
    dict.fromkeys(
        wgmma_kernel(row.tile, reads) for reads in CUDA_HOPPER for row in CUDA_HOPPER[reads]
    )
)


def choose_cuda(m: int, n: int, k: int) -> Tile:
    """The tile of mma.sync for a product [m, k] by [n, k]."""
    return _first(CUDA, m, n, k)


def choose_wgmma(m: int, n: int, k: int, reads: Reads) -> Tile:
    """The tile on Hopper for a product [m, k] by [n, k] of operands that TMA reads so."""
    if reads not in CUDA_HOPPER:
        # Turned over it is the gradient of rows.
        return replace(choose_wgmma(n, m, k, reads[::-1]), swap=True)
    return _first(CUDA_HOPPER[reads], m, n, k)


def wgmma_candidates(reads: Reads) -> tuple[Tile, ...]:
    """Every tile that `choose_wgmma` may return."""
    if reads not in CUDA_HOPPER:
        return tuple(replace(tile, swap=True) for tile in wgmma_candidates(reads[::-1]))
    return tuple(dict.fromkeys(row.tile for row in CUDA_HOPPER[reads]))


def _first(rows: tuple[Row, ...], m: int, n: int, k: int) -> Tile:
    return next(row.tile for row in rows if m <= row.m and n <= row.n and k <= row.k)
