# SPDX-License-Identifier: Apache-2.0
"""Ten million fuzzed columns: every backend of the exact sum against sums known by construction.

A column holds pairs that cancel and a remainder whose exact sum FP64 holds, shuffled. The oracle
rounds the remainder in FP64; integers of any size check columns once more, and the oracle.
"""

from dataclasses import dataclass

import pytest
import torch

from rlk.compare import assert_same_bits
from rlk.cuda import toolchain
from rlk.reduce import exact_sum
from rlk.reduce.exact_sum import hard_cases
from rlk.reduce.exact_sum.golden import FORMATS

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
BACKENDS = ("cuda", "triton")
DEVICE = "cuda"
CASES = 10_000_000
# 2^20: columns of one piece.
PIECE = 1 << 20
PAIRS = 5
# Columns that Python's integers sum.
BY_INTEGERS = 100_000
FP32, FP64 = torch.float32, torch.float64


@dataclass(frozen=True)
class Columns:
    """rows [R, C], FP32, and the exact sum as FP64 rounded to odd: any rounding of it is right."""

    rows: torch.Tensor
    total: torch.Tensor


def bits_as_float(bits: torch.Tensor) -> torch.Tensor:
    return torch.where(bits < 1 << 31, bits, bits - (1 << 32)).int().view(FP32)


def random_floats(generator: torch.Generator, shape: tuple[int, ...], lowest, highest):
    """FP32 with random sign and fraction, and an exponent field of lowest to highest."""
    field = torch.randint(0, 1 << 30, shape, generator=generator, device=generator.device)
    field = lowest + field % (highest - lowest + 1)
    fraction = torch.randint(0, 1 << 23, shape, generator=generator, device=generator.device)
    sign = torch.randint(0, 2, shape, generator=generator, device=generator.device)
    return bits_as_float(sign << 31 | field << 23 | fraction)


def tie_partner(a: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the distance of `dtype`'s neighbours at a, with any sign; FP32 holds it or 0."""
    form = FORMATS[dtype]
    exponent = (a.view(torch.int32) >> 23 & 255).clamp(min=1).long() - 150  # of the last FP32 bit
    lowest = (exponent + 24 - form.precision).clamp(min=form.lowest_bit - 149)
    # By its FP64 exponent field; half of 2^-149 becomes 0.
    return (lowest - 1 + 1023 << 52).view(FP64).to(FP32)


def to_odd(total: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """total + rest rounded to odd, where rest is below the last bit of total."""
    bits = total.view(torch.int64)
    side = total.sign() * rest.sign()
    odd = torch.where(side > 0, bits | 1, torch.where(side < 0, (bits - 1) | 1, bits))
    return torch.where(total == 0, rest, odd.view(FP64))


def fuzzed(seed: int, columns: int, device: str) -> Columns:
    """Columns of three kinds of spread; a quarter ends at ties of each destination."""
    generator = torch.Generator(device).manual_seed(seed)
    kind = seed % 3
    # All exponents, those of one register, those of normalised data.
    low, high = ((0, 254), (100, 140), (120, 130))[kind]
    pairs = random_floats(generator, (PAIRS, columns), low, high)
    a = random_floats(generator, (1, columns), low, high)
    field = a.view(torch.int32) >> 23 & 255
    # At most 28 binades apart, so that a + b has no more than 53 bits.
    b = random_floats(generator, (1, columns), (field.long() - 28).clamp(min=0), field.long())
    place = torch.arange(columns, device=device)[None] % 8
    for turn, dtype in enumerate(FORMATS):
        b = torch.where(place == turn, tie_partner(narrowed(a, dtype, place == turn), dtype), b)
        a = torch.where(place == turn, narrowed(a, dtype, place == turn), a)
    # A last term far below a + b decides ties; where it would not be far below, there is none.
    left, right = a.double(), b.double()
    total = left + right
    part = total - left
    lost = (left - (total - part)) + (right - part)  # of ties far above a
    tiny = random_floats(generator, (1, columns), 0, 0).sign() * 2.0**-149
    far = (total.abs() > 2.0**-90) & (place % 2 == 0)
    c = torch.where(far, tiny, torch.zeros_like(tiny))
    zero = torch.full_like(a, -0.0)
    rows = torch.cat([pairs, pairs * -1.0, a, b, c, zero])
    order = torch.rand(rows.shape, generator=generator, device=device).argsort(0)
    return Columns(rows.gather(0, order), to_odd(total, lost + c)[0])


def narrowed(a: torch.Tensor, dtype: torch.dtype, where: torch.Tensor) -> torch.Tensor:
    """a cut to the precision of `dtype`, so that half a step more is a tie."""
    cut = 24 - FORMATS[dtype].precision
    return torch.where(where, (a.view(torch.int32) >> cut << cut).view(FP32), a)


def rounded(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """FP64 to nearest even in `dtype`, in one step; a cast may round twice."""
    form = FORMATS[dtype]
    last = torch.frexp(total).exponent.long() - form.precision
    last = last.clamp(min=form.lowest_bit - 149)
    # Powers of two by their exponent fields: scaling is exact, and round is half to even.
    step = (last + 1023 << 52).view(FP64)
    steps = torch.round(total / step)
    largest = torch.finfo(dtype).max
    value = steps * step
    value = torch.where(value.abs() > largest, torch.copysign(value * torch.inf, total), value)
    # A non-zero sum keeps its sign when it rounds to zero; an exact zero is +0.
    value = torch.where(total == 0, 0.0, torch.copysign(value, total))
    return value.to(dtype)


def by_integers(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same of finite rows by Python's integers, in units of 2^-149."""
    form = FORMATS[dtype]
    bits = rows.view(torch.int32).cpu().t().tolist()
    results = []
    for column in bits:
        total = 0
        for value in column:
            field, fraction = value >> 23 & 255, value & 0x7FFFFF
            term = fraction if field == 0 else (fraction | 0x800000) << field - 1
            total += -term if value < 0 else term
        results.append(round_integer(total, form))
    return torch.tensor(results).to(form.storage).view(dtype)


def round_integer(total: int, form) -> int:
    """The bit pattern of total * 2^-149, to nearest even, as a signed integer."""
    size = abs(total)
    lowest = max(size.bit_length() - form.precision, form.lowest_bit)
    kept, rest = size >> lowest, size & ((1 << lowest) - 1)
    half = (1 << lowest) >> 1
    kept += lowest > 0 and (rest > half or (rest == half and kept & 1))
    pattern = min((lowest - form.lowest_bit << form.precision - 1) + kept, form.infinity)
    return pattern + form.sign if total < 0 else pattern


def summed(rows: torch.Tensor, backend: str) -> torch.Tensor:
    """The state of rows added in two halves and merged."""
    cut = len(rows) // 2
    states = [
        exact_sum.add_rows(exact_sum.new(rows.shape[1], rows.device), part, backend=backend)
        for part in (rows[:cut], rows[cut:])
    ]
    return exact_sum.merge(*states, backend=backend)


def wrong(actual: torch.Tensor, expected: torch.Tensor) -> int:
    """How many elements differ in any bit."""
    storage = {4: torch.int32, 2: torch.int16, 8: torch.int64}[actual.element_size()]
    return int((actual.view(storage) != expected.view(storage)).sum())


def test_oracles_fuzzed_columns_agree_and_golden_is_right() -> None:
    for seed in range(3):
        columns = fuzzed(seed, 3000, "cpu")
        state = summed(columns.rows, "golden")
        for dtype in FORMATS:
            expected = by_integers(columns.rows, dtype)
            assert_same_bits(rounded(columns.total, dtype), expected, f"oracle {seed} {dtype}")
            assert_same_bits(exact_sum.round(state, dtype, backend="golden"), expected)


def test_fuzzed_columns_meet_ties_overflow_subnormals_and_zero() -> None:
    totals = torch.cat([fuzzed(seed, 3000, "cpu").total for seed in range(3)])
    for dtype in FORMATS:
        exact = rounded(totals, dtype).double()
        assert 0 < int(exact.isinf().sum()) < len(totals)
        halves = rounded(totals * (1 + 2.0**-50), dtype) != rounded(totals * (1 - 2.0**-50), dtype)
        assert int(halves.sum()) > 0


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.xdist_group("exact_sum")
def test_ten_million_fuzzed_columns_every_backend_none_wrong() -> None:
    done = 0
    for seed in range(-(-CASES // PIECE)):
        columns = fuzzed(seed, PIECE, DEVICE)
        states = {backend: summed(columns.rows, backend) for backend in BACKENDS}
        first = states[BACKENDS[0]]
        for backend, state in states.items():
            assert wrong(state, first) == 0, (seed, backend)
            for dtype in FORMATS:
                actual = exact_sum.round(state, dtype, backend=backend)
                assert wrong(actual, rounded(columns.total, dtype)) == 0, (seed, backend, dtype)
        done += PIECE
    assert done >= CASES


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("backend", BACKENDS)
def test_fuzzed_columns_equal_sums_of_python_integers(backend: str) -> None:
    columns = fuzzed(3, BY_INTEGERS, DEVICE)
    state = summed(columns.rows, backend)
    for dtype in FORMATS:
        actual = exact_sum.round(state, dtype, backend=backend).cpu()
        assert_same_bits(actual, by_integers(columns.rows, dtype), str(dtype))


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_state_narrow_strided_and_special_rows_equals_golden(backend: str, dtype) -> None:
    generator = torch.Generator().manual_seed(9)
    for rows, columns in ((1, 1), (7, 3), (600, 33), (1100, 257)):
        c = torch.randn(rows, 2 * columns, generator=generator) * 1e3
        c = (c * torch.randint(-30, 31, c.shape, generator=generator).float().exp2()).to(dtype)
        c.view(-1)[:: max(1, c.numel() // 5)] = torch.inf
        c.view(-1)[1 :: max(1, c.numel() // 3)] = torch.nan
        part = c[:, ::2]
        expected = exact_sum.add_rows(exact_sum.new(columns), part, backend="golden")
        there = c.to(DEVICE)[:, ::2]
        actual = exact_sum.add_rows(exact_sum.new(columns, DEVICE), there, backend=backend)
        assert_same_bits(actual.cpu(), expected, f"{rows}x{columns}")


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("backend", BACKENDS)
def test_hard_case_every_destination_gives_its_sum(backend: str) -> None:
    for case in hard_cases.CASES:
        column = case.column().to(DEVICE)
        state = exact_sum.add_rows(exact_sum.new(1, DEVICE), column, backend=backend)
        for dtype, expected in case.sums.items():
            actual = exact_sum.round(state, dtype, backend=backend).cpu()
            assert_same_bits(actual, torch.tensor([expected]).to(dtype), f"{case.name} {dtype}")


def test_cuda_kernels_of_the_exact_sum_compile_without_a_gpu() -> None:
    if toolchain.nvcc_missing() is not None:
        pytest.skip("needs nvcc")
    from rlk.reduce.exact_sum import kernel_cuda

    # Of any memory: functions that are called add to states of blocks too.
    assert "atom.add.u64" in kernel_cuda.steps.compile_only("sm_90").ptx
