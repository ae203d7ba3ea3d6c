# SPDX-License-Identifier: Apache-2.0
"""Entries of the tables of sigmoids, and the steps in the place of a division, on the CPU."""

import ctypes
from pathlib import Path

import pytest
import torch

from rlk.compare import assert_same_bits
from rlk.math import golden
from rlk.test_support import on_host

SOURCE = Path(__file__).with_name("test_table.cu")
# Smaller values, HIGHEST and more, and what is no number, have no entry.
LOWEST, HIGHEST = 1.25 * 2.0**-26, 80.0
PLACES = 8
# Patterns beside: 0, 1/2, the last without an entry and the first with one, the last with one and
# the first without, Inf, NaN, all bits.
OTHERS = (0x0000, 0x3F00, 0x329F, 0xB2A0, 0xC29F, 0xC2A0, 0x7F80, 0x7FC0, 0xFFFF)
# An estimate one ulp below or above the rounded one would not be good enough here.
HARD_ROOTS = ("0x1.9a2854p+1", "0x1.b5c076p+1", "0x1.dd26e4p+1", "0x1.f82294p+0", "0x1.fffffep+1")
HARD_DIVISORS = (
    "0x1.fffffep+0",
    "0x1.0d3226p+0",
    "0x1.0f988ap+0",
    "0x1.1df486p+0",
    "0x1.213212p+0",
)


def every_bf16() -> torch.Tensor:
    """[65536]: all values, as FP32."""
    return (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)


def has_entry(patterns: torch.Tensor) -> torch.Tensor:
    size = every_bf16()[patterns.long()].abs()
    return (size >= LOWEST) & (size < HIGHEST)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """test_table.cu for the CPU."""
    return on_host.library(SOURCE, tmp_path_factory.mktemp("table"))


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@pytest.mark.parametrize("threads", [1, 512, 1024])
def test_entries_every_bf16_input_at_every_place_is_that_of_its_value(
    library: ctypes.CDLL, threads: int
) -> None:
    table = torch.full((library.table_size(),), torch.nan)
    library.table_entries(threads, pointer(table))
    z = every_bf16()
    for place in range(PLACES):
        for others in OTHERS:
            patterns = torch.full((1 << 16, PLACES), others, dtype=torch.int32)
            patterns[:, place] = torch.arange(1 << 16)
            inside, shape = torch.zeros(1 << 16, dtype=torch.int32), (1 << 16, PLACES)
            singles, pairs = (torch.zeros(shape, dtype=torch.int32) for _ in range(2))
            sixteen = patterns.to(torch.uint16)
            count = ctypes.c_longlong(len(patterns))
            out = (pointer(inside), pointer(singles), pointer(pairs))
            library.table_places(pointer(sixteen), count, *out)
            assert torch.equal(inside.bool(), has_entry(patterns).all(1)), (place, others)
            found = inside.bool()
            entry = singles[found, place].long() // 4
            assert_same_bits(table[entry], z[found], f"{place} {others}")
            assert torch.equal(pairs[found], 2 * singles[found])


def test_entry_every_bf16_input_alone_is_that_among_others(library: ctypes.CDLL) -> None:
    table = torch.full((library.table_size(),), torch.nan)
    library.table_entries(512, pointer(table))
    patterns = torch.arange(1 << 16).to(torch.uint16)
    entries = torch.zeros(1 << 16, dtype=torch.int32)
    library.table_single_places(pointer(patterns), ctypes.c_longlong(1 << 16), pointer(entries))
    found = has_entry(torch.arange(1 << 16))
    assert torch.equal(entries < library.table_size(), found)
    assert_same_bits(table[entries[found].long()], every_bf16()[found], "entries")


def around(hard: tuple[str, ...], first: float) -> torch.Tensor:
    """Inputs of two binades from `first` on: drawn ones, both ends of each, and hard ones."""
    start = torch.tensor(first).view(torch.int32)
    offsets = torch.randint(0, 1 << 24, (1 << 18,), generator=torch.Generator().manual_seed(0))
    ends = torch.arange(1 << 10)
    offsets = torch.cat(
        [offsets, ends, (1 << 23) - 1 - ends, (1 << 23) + ends, (1 << 24) - 1 - ends]
    )
    drawn = (start + offsets.int()).view(torch.float32)
    return torch.cat([drawn, torch.tensor([float.fromhex(value) for value in hard])])


def test_step_from_the_rounded_estimate_gives_the_rounded_root() -> None:
    """The written steps of reciprocal_root; on a GPU a test takes its estimates."""
    x = around(HARD_ROOTS, 1.0)
    estimate = x.double().sqrt().reciprocal().float()
    root = x * estimate
    rest = golden.fma(golden.negate(root), root, x)
    assert_same_bits(golden.fma(rest, estimate * 0.5, root), golden.sqrt(x), "root")


def test_step_from_the_rounded_estimate_gives_the_rounded_reciprocal() -> None:
    """The same of reciprocal_in_range."""
    d = around(HARD_DIVISORS, 1.0)
    one = torch.ones_like(d)
    estimate = golden.divide(one, d)
    error = golden.fma(golden.negate(d), estimate, one)
    assert_same_bits(golden.fma(estimate, error, estimate), estimate, "reciprocal")
