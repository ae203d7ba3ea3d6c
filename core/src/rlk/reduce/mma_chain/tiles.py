# SPDX-License-Identifier: Apache-2.0
"""Which tile shape serves which product: the only place, for speed alone. No bit depends on it."""

import math
from dataclasses import dataclass

# 32: of K, within which the three products of FP32 operands take turns; part of the order.
FP32_BLOCK = 32


@dataclass(frozen=True)
class Tile:
    """A block of the result, and how a program forms it.

    `m`, `n` and `k` are its sizes; `n2` is the width of a second accumulator beside the first, so
    that a tile may be 192 wide. `swap` makes the rows of b those of the tile: for few rows of a.
    `waves` is the number of programs a multiprocessor gets, each of which forms tile after tile; 0
    gives every tile a program of its own. `group` rows of tiles share the columns in the L2 cache.
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


# Of each table the first row that is large enough serves.
NARROW_TMA = (
    Row(Tile(64, 128, 16, 4, 1), k=16),
    Row(Tile(128, 128, 64, 8, 2), k=128),
    Row(Tile(32, 16, 256, 2, 4, swap=True), m=16),
    Row(Tile(64, 32, 128, 4, 4), m=64),
    Row(Tile(64, 64, 64, 4, 6, n2=32), m=128),
    Row(Tile(64, 128, 64, 4, 5, n2=64), m=256, n=6144),
    Row(Tile(128, 64, 64, 8, 5, n2=32), m=512, n=3072),
    Row(Tile(128, 128, 64, 8, 4, n2=64)),
)
FP32_TMA = (
    Row(Tile(32, 16, FP32_BLOCK, 2, 8, swap=True), m=16),
    Row(Tile(64, 64, FP32_BLOCK, 4, 4), m=256),
    Row(Tile(128, 128, FP32_BLOCK, 8, 3)),
)
NARROW_POINTERS = (
    Row(Tile(32, 16, 128, 2, 4, swap=True), m=16),
    Row(Tile(64, 64, 64, 4, 4), m=256),
    Row(Tile(128, 128, 32, 8, 4)),
)
FP32_POINTERS = (
    Row(Tile(32, 16, FP32_BLOCK, 2, 4, swap=True), m=16),
    Row(Tile(64, 64, FP32_BLOCK, 4, 3), m=256),
    Row(Tile(128, 64, FP32_BLOCK, 8, 3)),
)
TABLES = {
    (True, True): FP32_TMA,
    (True, False): NARROW_TMA,
    (False, True): FP32_POINTERS,
    (False, False): NARROW_POINTERS,
}


def choose(m: int, n: int, k: int, *, by_tma: bool, fp32: bool) -> Tile:
    """The tile that serves a product [m, k] by [n, k]."""
    table = TABLES[by_tma, fp32]
    return next(row.tile for row in table if m <= row.m and n <= row.n and k <= row.k)


def candidates(*, by_tma: bool, fp32: bool) -> tuple[Tile, ...]:
    """Every tile that `choose` may return."""
    return tuple(dict.fromkeys(row.tile for row in TABLES[by_tma, fp32]))


# The shapes that kernel_cuda.cu has; their blocks of K and stages are written there.
CUDA = (
    Row(Tile(16, 32, 128, 4, 4), m=16),
    Row(Tile(64, 64, 64, 4, 4), m=256),
    Row(Tile(64, 64, 64, 4, 4), k=128),
    Row(Tile(128, 128, 64, 8, 3)),
)


def choose_cuda(m: int, n: int, k: int) -> Tile:
    """The tile of the CUDA kernel for a product [m, k] by [n, k]."""
    return next(row.tile for row in CUDA if m <= row.m and n <= row.n and k <= row.k)
