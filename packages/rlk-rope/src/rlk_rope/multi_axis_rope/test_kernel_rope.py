# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel's way through memory, run on the CPU: golden's bits."""

import ctypes
import itertools
from pathlib import Path

import pytest
import torch

from rlk.compare import assert_same_bits
from rlk.test_support import on_host
from rlk.test_support.layouts import columns_first, shifted, spread

from . import golden

HERE = Path(__file__).parent
# (B, S, (H of both tensors), D, P): whole units and a rest; a rest of one word, of an odd number
# of words, of odd columns; fewer heads than a thread takes, and more; one tensor alone; a block's
# last thread, and one more.
SIZES = (
    (1, 5, (24, 24), 128, 64), (2, 3, (16, 2), 256, 32), (3, 4, (5, 1), 48, 16),
    (2, 7, (1, 0), 24, 8), (2, 3, (0, 3), 40, 8), (1, 2, (3, 9), 7, 2), (2, 1, (2, 3), 130, 65),
    (3, 1, (1, 1), 2, 1), (1, 8, (2, 0), 128, 64), (1, 129, (2, 0), 8, 4), (2, 2, (1, 7), 56, 8),
)  # fmt: skip
NONE = 2**31 - 1


def packed(x: torch.Tensor) -> torch.Tensor:
    """One of query, key and value of a fused projection."""
    return x.new_empty(*x.shape[:2], 3, *x.shape[2:])[:, :, 1].copy_(x)


def repeated(x: torch.Tensor) -> torch.Tensor:
    """The first token everywhere."""
    return x[:, :1].expand_as(x)


def of_one_sample(table: torch.Tensor) -> torch.Tensor:
    """Shared by all samples."""
    return table[:1].expand_as(table)


def apart(table: torch.Tensor) -> torch.Tensor:
    """As the real parts of complex numbers lie."""
    return torch.stack((table, table), -1)[..., 0]


contiguous = torch.Tensor.contiguous
LAYOUTS = (contiguous, packed, repeated, spread, columns_first, shifted)
# Of tensors and of tables.
PLACES = (
    (contiguous, contiguous), (contiguous, apart), (packed, of_one_sample), (repeated, contiguous),
    (spread, shifted), (columns_first, apart), (shifted, of_one_sample),
)  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """test_kernel_rope.cu for the CPU."""
    folder = tmp_path_factory.mktemp("rope")
    return on_host.library(HERE / "test_kernel_rope.cu", folder, HERE.parents[1])


def integers(*values: int) -> ctypes.Array[ctypes.c_longlong]:
    return (ctypes.c_longlong * len(values))(*values)


def pointers(*tensors: torch.Tensor) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))


def strides(*tensors: torch.Tensor) -> ctypes.Array[ctypes.c_longlong]:
    return integers(*(stride for t in tensors for stride in t.stride()))


def turn_both(
    library: ctypes.CDLL,
    given: list[torch.Tensor],
    tables: tuple[torch.Tensor, torch.Tensor],
    options: tuple[bool, str, bool],
    limit: int = NONE,
) -> tuple[int, list[torch.Tensor]]:
    """The launcher's status, and results with NaN where nothing has been stored."""
    interleaved, rounding, inverse = options
    # 8: elements around a result that nothing may store to.
    rooms = [torch.full((t.numel() + 16,), float("nan")) for t in given]
    out = [room[8:-8].view(t.shape) for room, t in zip(rooms, given, strict=True)]
    (batch, seq, _, columns), pairs = given[0].shape, tables[0].shape[-1]
    kind = (ctypes.c_int * 3)(interleaved, rounding == "complex_eager", inverse)
    status = library.turn_both(
        pointers(*given), pointers(*out), strides(*given), integers(*(t.shape[2] for t in given)),
        pointers(*tables), strides(*tables), integers(batch, seq, columns, pairs), kind,
        ctypes.c_longlong(limit),
    )  # fmt: skip
    assert all(room[:8].isnan().all() and room[-8:].isnan().all() for room in rooms)
    return status, out


def assert_golden(
    library: ctypes.CDLL,
    given: list[torch.Tensor],
    tables: tuple[torch.Tensor, torch.Tensor],
    options: tuple[bool, str, bool],
    what: str,
    limit: int = NONE,
) -> None:
    status, found = turn_both(library, given, tables, options, limit)
    assert status == 0, what
    for x, y in zip(given, found, strict=True):
        wanted = golden.rotate(x, *tables, *options[:2], inverse=options[2])
        assert_same_bits(y, wanted, what)


def tensors(size: tuple) -> tuple[list[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Both tensors, and tables [B, S, P]."""
    batch, seq, heads, columns, pairs = size
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(batch, seq, h, columns, generator=generator) for h in heads]
    angles = torch.rand(batch, seq, pairs, generator=generator) * 6.28
    return given, (angles.cos(), angles.sin())


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernel_every_kind_and_layout_has_the_bits_of_golden(
    library: ctypes.CDLL, size: tuple
) -> None:
    given, tables = tensors(size)
    kinds = itertools.product((True, False), ("separate", "complex_eager"), (True, False))
    for options in kinds:
        for layout, of_tables in PLACES:
            placed = [layout(t) for t in given], tuple(of_tables(t) for t in tables)
            what = f"{layout.__name__} {of_tables.__name__} {options}"
            assert_golden(library, *placed, options, what)


# 48: no token of these has more work.
@pytest.mark.parametrize("limit", [700, 90, 48])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("size", [(5, 3, (2, 1), 48, 16), (1, 17, (3, 0), 24, 8)], ids=str)
def test_kernel_launches_of_parts_have_the_bits_of_one(
    library: ctypes.CDLL, size: tuple, interleaved: bool, limit: int
) -> None:
    given, tables = tensors(size)
    for layout in LAYOUTS:
        x = [layout(t) for t in given]
        options = interleaved, "separate", False
        assert_golden(library, x, tables, options, f"{layout.__name__} {limit}", limit)


def test_kernel_token_of_more_work_than_a_launch_is_refused(library: ctypes.CDLL) -> None:
    given, tables = tensors((1, 3, (1, 1), 64, 32))
    status, found = turn_both(library, given, tables, (True, "separate", False), limit=15)
    assert status == 1
    assert all(t.isnan().all() for t in found)


def test_divisor_products_are_the_quotients(library: ctypes.CDLL) -> None:
    library.wrong_divisor.restype = ctypes.c_longlong
    assert library.wrong_divisor(1 << 20) == 0
