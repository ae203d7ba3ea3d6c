# SPDX-License-Identifier: Apache-2.0
"""Sums by windows in CUDA, and their passes, on the CPU: the states of golden."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlk.compare import assert_same_bits
from rlk.cuda.launch import DTYPE_CODES
from rlk.reduce import exact_sum
from rlk.reduce.exact_sum import hard_cases
from rlk.reduce.exact_sum.form import SumForm
from rlk.reduce.exact_sum.golden import FORMATS
from rlk.test_support import on_host

HERE = Path(__file__).parent
# The order of `sum_by_one_thread` in test_windows.cu: sums, and rows that are added together.
KINDS = ("window_1", "window_2", "window_4")
# 8: columns of a thread.
COLUMNS = 8
# 27: binades of a window, up to 2^4 where 1 is the largest term that it was made for.
BINADES, ABOVE = 27, 4
FLT_MAX = torch.finfo(torch.float32).max
# (lanes, threads, blocks, columns): blocks of several groups, parts and chunks; 0 lanes where a
# block has all columns. The last ones leave more partials than are loaded at once.
PASSES = (
    (16, 256, 1, 128), (16, 256, 3, 100), (16, 512, 2, 128), (16, 512, 1, 8), (32, 256, 1, 300),
    (32, 256, 2, 256), (32, 256, 5, 513), (32, 512, 1, 200), (32, 512, 2, 255), (0, 0, 3, 300),
    (0, 0, 1, 257), (0, 0, 330, 8), (16, 512, 85, 8),
)  # fmt: skip


def exponents(lowest: int, highest: int, rows: int, seed: int) -> torch.Tensor:
    """Random numbers times powers of two of this range."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(lowest, highest + 1, (rows, COLUMNS), generator=generator)
    values = torch.randn(rows, COLUMNS, generator=generator, dtype=torch.float64)
    return (values * powers.double().exp2()).clamp(-FLT_MAX, FLT_MAX).float()


def at_edges() -> torch.Tensor:
    """Powers of two around both ends of the window that 1 makes, and the values beside them."""
    edges = torch.tensor([2.0**e for e in range(ABOVE - BINADES - 2, ABOVE + 3)])
    below = (edges.view(torch.int32) - 1).view(torch.float32)
    above = (edges.view(torch.int32) + 1).view(torch.float32)
    values = torch.stack([edges, -below, above, -edges, below, -above], 1).flatten()
    rows = torch.ones(len(values), COLUMNS)
    rows[:, 3], rows[::2, 5] = values, 0.0
    return torch.cat([rows, rows.flip(0)])


def spanning() -> torch.Tensor:
    """Terms at the bottom of a window and then above its top, which FP64 does not hold together."""
    bottom, whole = 2.0 ** (ABOVE - BINADES) * (1 + 2.0**-23), torch.ones(COLUMNS)
    rows = []
    for above in range(8):
        low, high = whole.clone(), whole.clone()
        low[2], high[2] = bottom, 2.0 ** (ABOVE + above)
        rows += [whole, low, high, whole, -high]
    return torch.stack(rows)


def growing() -> torch.Tensor:
    """Terms of one sign at the top of a window, so that sums reach what it has room for."""
    top = torch.full((1200, COLUMNS), 2.0**ABOVE * (1 - 2.0**-24))
    top[0] = 1.0
    top[1::7, 2] = 2.0 ** (ABOVE - BINADES) * (1 + 2.0**-23)
    return top


def alternating(power: int) -> torch.Tensor:
    """Rows of two scales by turns."""
    rows = exponents(0, 0, 400, 1)
    rows[::2] *= 2.0**power
    rows[1::2] *= 2.0**-power
    return rows


def zeros_first() -> torch.Tensor:
    """Zeros of both signs before other rows and among them."""
    rows = exponents(-3, 3, 300, 2)
    rows[:150], rows[::5, ::3] = 0.0, -0.0
    return rows


def one_huge() -> torch.Tensor:
    """One huge term among tiny ones, and its opposite."""
    rows = exponents(-140, -120, 200, 3)
    rows[7, 1], rows[90, 1], rows[50, 6] = 2.0**126, -(2.0**126), FLT_MAX
    return rows


def specials() -> torch.Tensor:
    """NaN and Inf among numbers, and columns of nothing else."""
    rows = exponents(-2, 2, 100, 4)
    rows[::9, 0], rows[3, 1], rows[5, 1], rows[8, 2] = torch.nan, torch.inf, -torch.inf, torch.inf
    rows[:, 7], rows[40:60] = -torch.inf, torch.nan
    return rows


def patterns() -> torch.Tensor:
    """Any bits."""
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(1 << 31), 1 << 31, (500, COLUMNS), generator=generator)
    return bits.int().view(torch.float32)


def of_hard_cases() -> torch.Tensor:
    """The columns of hard_cases.py, each in one of the columns, one after another."""
    columns = [case.column()[:, 0] for case in hard_cases.CASES]
    rows = torch.zeros(sum(map(len, columns)), COLUMNS)
    first = 0
    for i, column in enumerate(columns):
        rows[first : first + len(column), i % COLUMNS] = column
        first += len(column)
    return rows


BATCHES: dict[str, Callable[[], torch.Tensor]] = {
    "none": lambda: torch.zeros(0, COLUMNS),
    "zeros": lambda: torch.zeros(9, COLUMNS),
    "normal": lambda: exponents(0, 0, 1001, 0),
    "decades": lambda: exponents(-150, 127, 700, 6),
    "subnormal": lambda: exponents(-149, -124, 700, 7),
    "largest": lambda: exponents(126, 128, 300, 8),
    "rising": lambda: torch.cat([exponents(e, e, 3, e + 200) for e in range(-149, 127, 3)]),
    "falling": lambda: torch.cat([exponents(e, e, 3, e + 200) for e in range(126, -150, -3)]),
    "alternating_40": lambda: alternating(40),
    "alternating_14": lambda: alternating(14),
    "at_edges": at_edges,
    "spanning": spanning,
    "growing": growing,
    "zeros_first": zeros_first,
    "one_huge": one_huge,
    "specials": specials,
    "patterns": patterns,
    "hard_cases": of_hard_cases,
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """test_windows.cu for the CPU."""
    return on_host.library(HERE / "test_windows.cu", tmp_path_factory.mktemp("windows"))


def state_of(terms: torch.Tensor) -> torch.Tensor:
    """Golden's state."""
    return exact_sum.add_rows(exact_sum.new(terms.shape[1]), terms, backend="golden")


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BATCHES)
def test_sums_of_one_thread_any_terms_have_the_state_of_golden(
    library: ctypes.CDLL, name: str, kind: str
) -> None:
    terms = BATCHES[name]().contiguous()
    state = torch.zeros(13, COLUMNS, dtype=torch.int64)
    rows = ctypes.c_longlong(len(terms))
    library.sum_by_one_thread(pointer(terms), rows, KINDS.index(kind), pointer(state))
    assert_same_bits(state, state_of(terms), f"{name} {kind}")


def of_columns(name: str, columns: int, most: int) -> torch.Tensor:
    """A batch as rows of so many columns, at most `most` of them."""
    terms = BATCHES[name]().flatten()
    rows = min(most, len(terms) // columns)
    return terms[: rows * columns].view(rows, columns).contiguous()


@pytest.mark.parametrize("case", PASSES, ids=str)
@pytest.mark.parametrize("name", ["normal", "decades", "patterns", "specials", "one_huge"])
def test_passes_any_division_have_the_state_of_golden(
    library: ctypes.CDLL, name: str, case: tuple[int, int, int, int]
) -> None:
    lanes, threads, blocks, columns = case
    # Rows that do not fill the last turns of the blocks.
    terms = of_columns(name, columns, max(71, blocks + 9))
    # Nothing may count on zeros in the state.
    state = torch.full((13, columns), -1, dtype=torch.int64)
    sizes = ctypes.c_longlong(len(terms)), ctypes.c_longlong(columns)
    library.sum_by_passes(
        pointer(terms), *sizes, lanes, threads, blocks, pointer(state), None, 0, 0
    )
    assert_same_bits(state, state_of(terms), f"{name} {case}")


# A pass of one block, two passes, and those of long rows; and no passes but a thread a column.
ENDS = ((16, 256, 1, 100), (32, 256, 5, 300), (0, 0, 3, 300), None)


def at_ties(columns: int, most: int) -> torch.Tensor:
    """Columns whose sum is halfway between two values of a dtype, or just beside that."""
    generator = torch.Generator().manual_seed(9)
    pick = [torch.randint(0, n, (columns,), generator=generator) for n in (2, 3, 8, 30)]
    precision = torch.tensor([8.0, 11.0, 24.0])[pick[1]]
    tails = [0.0, 2.0**-30, -(2.0**-30), 2.0**-70, -(2.0**-70), 2.0**-149, -(2.0**-149), 2.0**-126]
    rows = torch.zeros(most, columns)
    rows[1] = 1 + pick[0] * (1 - precision).exp2()
    rows[most // 2] = (-precision).exp2()
    rows[most // 3] = torch.tensor(tails)[pick[2]]
    rows *= (1 - 2 * (pick[3] % 2)).float()
    # Through values that no FP32 holds beside these.
    rows[2], rows[-1] = 2.0**60, -(2.0**60)
    return rows


@pytest.mark.parametrize("case", ENDS, ids=str)
@pytest.mark.parametrize("name", ["normal", "decades", "specials", "ties"])
def test_sums_end_in_each_form_as_golden_ends_them(
    library: ctypes.CDLL, name: str, case: tuple[int, int, int, int] | None
) -> None:
    columns = 70 if case is None else case[-1]
    terms = at_ties(columns, 40) if name == "ties" else of_columns(name, columns, 40)
    wanted = state_of(terms)

    def run(data: torch.Tensor, sums: torch.Tensor, form: SumForm) -> None:
        ends = pointer(data), pointer(sums), DTYPE_CODES[sums.dtype], int(form)
        sizes = ctypes.c_longlong(len(terms)), ctypes.c_longlong(columns)
        if case is None:
            library.sum_few(pointer(terms), *sizes, *ends)
        else:
            library.sum_by_passes(pointer(terms), *sizes, *case[:3], *ends)

    for dtype in FORMATS:
        # No result may count on what its memory holds.
        sums = torch.full((columns,), torch.nan, dtype=dtype)
        run(torch.full((13, columns), -1), sums, SumForm.ROUNDED)
        assert_same_bits(sums, exact_sum.round(wanted, dtype, backend="golden"), f"{name} {dtype}")
        state = torch.full((13, columns), torch.nan, dtype=torch.float64)
        run(state, sums, SumForm.CARRIED)
        assert_same_bits(state, wanted.double(), f"{name} carried")
        assert_same_bits(sums, torch.zeros(columns, dtype=dtype), f"{name} zeros")
    state = torch.full((13, columns), -1)
    run(state, sums, SumForm.STATE)
    assert_same_bits(state, wanted, f"{name} state")


@pytest.mark.parametrize("tail", [1, -1])
@pytest.mark.parametrize(("lanes", "threads", "groups"), [(0, 0, 1), (16, 256, 16)], ids=str)
def test_second_pass_what_one_pair_cannot_hold_decides_a_tie(
    library: ctypes.CDLL, lanes: int, threads: int, groups: int, tail: int
) -> None:
    """Five blocks of one thread, the smallest of which no other column or thread tells of."""
    blocks = 257
    terms = torch.zeros(blocks * groups, 1)
    first = 1.0 if tail > 0 else 1 + 2.0**-23
    values = first, 2.0**-24, 2.0**-80, tail * 2.0**-149, -(2.0**-80)
    # 64: threads of a column.
    terms[:: 64 * groups, 0] = torch.tensor(values)
    state, sums = torch.full((13, 1), -1), torch.full((1,), torch.nan)
    sizes = ctypes.c_longlong(len(terms)), ctypes.c_longlong(1)
    ends = pointer(state), pointer(sums), DTYPE_CODES[sums.dtype], int(SumForm.ROUNDED)
    library.sum_by_passes(pointer(terms), *sizes, lanes, threads, blocks, *ends)
    assert sums.item() == 1 + 2.0**-23
