# SPDX-License-Identifier: Apache-2.0
"""Exact sums against integers of any size, which hold every FP32 in units of 2^-149."""

import math
import random
from collections.abc import Callable
from fractions import Fraction

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from rlk import interpreter, trace
from rlk.compare import assert_same_bits
from rlk.errors import ArgumentError, BackendError, GradientError
from rlk.reduce import exact_sum
from rlk.reduce.exact_sum.hard_cases import CASES, Case

interpreter.enable_without_gpu()
# Where the Triton kernels of this process run; None without triton.
TRITON_DEVICE = "cpu" if interpreter.is_enabled() else "cuda" if torch.cuda.is_available() else None
BACKENDS = ["golden", pytest.param("triton", marks=pytest.mark.skipif(
    TRITON_DEVICE is None, reason="needs triton"
))]  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Significand bits, exponent of the smallest subnormal, and the first power of two too large.
DESTINATIONS = {
    torch.float32: (24, -149, 2.0**128),
    torch.bfloat16: (8, -133, 2.0**128),
    torch.float16: (11, -24, 2.0**16),
}


def integers(rows: torch.Tensor) -> list[int]:
    """The exact sums of finite FP32 columns, in units of 2^-149."""
    totals = [0] * rows.shape[1]
    for row in rows.view(torch.int32).numpy().astype(np.int64):
        exponent, fraction = row >> 23 & 255, row & 0x7FFFFF
        m = np.where(exponent == 0, fraction, fraction + 0x800000) * np.where(row < 0, -1, 1)
        p = np.where(exponent == 0, 0, exponent - 1)
        terms = zip(totals, m.tolist(), p.tolist(), strict=True)
        totals = [total + (a << b) for total, a, b in terms]
    return totals


def nearest(total: int, dtype: torch.dtype) -> float:
    """`total` * 2^-149 rounded to nearest even."""
    precision, smallest, too_large = DESTINATIONS[dtype]
    size = abs(total)
    step = max(size.bit_length() - precision, smallest + 149)
    quotient, rest = size >> step, size & (1 << step) - 1
    quotient += 2 * rest + (quotient & 1) > 1 << step
    value = math.ldexp(quotient, step - 149)
    value = value if value < too_large else math.inf
    return -value if total < 0 else value


def rounded(totals: list[int], dtype: torch.dtype) -> torch.Tensor:
    # FP64 holds every value of the destinations.
    return torch.tensor([nearest(t, dtype) for t in totals], dtype=torch.float64).to(dtype)


def state_values(state: torch.Tensor) -> list[int]:
    """What the limbs of a state hold, normalised or not, in units of 2^-149."""
    return [sum(d << 32 * k for k, d in enumerate(c[:10])) for c in state.T.tolist()]


def from_bits(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32))


def power(position: np.ndarray) -> np.ndarray:
    """The FP32 pattern of 2^(position - 149)."""
    return np.where(position < 23, 1 << np.minimum(position, 22), position - 22 << 23)


def finite(generator: np.random.Generator, *shape: int) -> np.ndarray:
    """Random patterns of finite FP32, every exponent alike."""
    bits = generator.integers(0, 255 << 23, shape)
    return bits | generator.integers(0, 2, shape) << 31


def tie(generator: np.random.Generator, value: np.ndarray, half: np.ndarray) -> torch.Tensor:
    """A value, half a step of its destination, and nothing or a little more or less."""
    sign = generator.integers(0, 2, (2, *value.shape)) << 31
    nudge = power(generator.integers(0, 1 + half)) * generator.integers(0, 2, value.shape)
    return from_bits(np.stack([value, power(half) | sign[0], nudge | sign[1]]))


def any_exponent(generator: np.random.Generator, columns: int) -> torch.Tensor:
    return from_bits(finite(generator, 4, columns))


def cancelling(generator: np.random.Generator, columns: int) -> torch.Tensor:
    bits = finite(generator, 4, columns)
    bits[3] = bits[0] ^ 1 << 31 ^ generator.integers(0, 16, columns)
    # A remainder anywhere below the pair.
    bits[2] = (bits[2] & 0x7FFFFFFF) >> generator.integers(0, 9, columns)
    bits[1] *= generator.integers(0, 2, columns)
    return from_bits(bits)


def float32_ties(generator: np.random.Generator, columns: int) -> torch.Tensor:
    value = finite(generator, columns)
    return tie(generator, value, np.maximum((value >> 23 & 255) - 2, 0))


def bfloat16_ties(generator: np.random.Generator, columns: int) -> torch.Tensor:
    value = finite(generator, columns) >> 16 << 16
    return tie(generator, value, np.maximum(value >> 23 & 255, 1) - 1 + 15)


def float16_ties(generator: np.random.Generator, columns: int) -> torch.Tensor:
    bits = generator.integers(0, 0x7C00, columns) | generator.integers(0, 2, columns) << 15
    value = bits.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    return tie(generator, value.astype(np.int64), np.maximum(bits >> 10 & 31, 1) - 1 + 124)


Family = Callable[[np.random.Generator, int], torch.Tensor]
FAMILIES: tuple[Family, ...] = (any_exponent, cancelling, float32_ties, bfloat16_ties, float16_ties)


def summed(rows: torch.Tensor, backend: str = "golden") -> torch.Tensor:
    """The state of `rows` from one backend, on the CPU."""
    device = TRITON_DEVICE if backend == "triton" else "cpu"
    state = exact_sum.new(rows.shape[1], device)
    return exact_sum.add_rows(state, rows.to(device), backend=backend).cpu()


def round_on(state: torch.Tensor, dtype: torch.dtype, backend: str) -> torch.Tensor:
    device = TRITON_DEVICE if backend == "triton" else "cpu"
    return exact_sum.round(state.to(device), dtype, backend=backend).cpu()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sum_hard_case_gives_hand_answer(case: Case) -> None:
    column = case.column()
    for dtype, value in case.sums.items():
        want = torch.tensor([value], dtype=torch.float64).to(dtype)
        assert_same_bits(exact_sum.round(summed(column), dtype), want)
        assert_same_bits(exact_sum.round(summed(column.flip(0)), dtype), want)
        if column.isfinite().all():
            assert_same_bits(rounded(integers(column), dtype), want, "oracle")


@pytest.mark.parametrize("family", FAMILIES)
def test_sum_fuzzed_columns_is_nearest(family: Family) -> None:
    rows = family(np.random.default_rng(1), 200_000)
    totals, state = integers(rows), summed(rows)
    assert state_values(state) == totals
    for dtype in DTYPES:
        assert_same_bits(exact_sum.round(state, dtype), rounded(totals, dtype))


@pytest.mark.skipif(TRITON_DEVICE is None, reason="needs triton")
def test_triton_fuzzed_and_hard_columns_equals_golden() -> None:
    generator = np.random.default_rng(2)
    fuzzed = [family(generator, 300) for family in FAMILIES]
    # A block of 128 rows and a part of the next.
    tall = [from_bits(finite(generator, 131, 40)), torch.randn(131, 40)]
    for columns in (fuzzed, tall, [case.column() for case in CASES]):
        height = max(c.shape[0] for c in columns)
        pad = torch.nn.functional.pad
        rows = torch.cat([pad(c, (0, 0, 0, height - c.shape[0])) for c in columns], 1)
        state = summed(rows)
        assert_same_bits(summed(rows, "triton"), state)
        for dtype in DTYPES:
            assert_same_bits(round_on(state, dtype, "triton"), exact_sum.round(state, dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_sum_of_one_narrow_row_is_the_row(dtype: torch.dtype, backend: str) -> None:
    step = 1 if backend == "golden" else 37
    bits = torch.arange(-(2**15), 2**15, step).to(torch.int16)
    row = bits.view(dtype)
    want = torch.where(row == 0, torch.zeros_like(row), row)
    assert_same_bits(round_on(summed(row[None], backend), dtype, backend), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1.0, 2.0**40, 2.0**-40])
def test_state_zero_rows_and_scaled_rows_is_exact(scale: float, backend: str) -> None:
    rows = torch.randn(200, 3, generator=torch.Generator().manual_seed(3))
    rows[:100] = 0.0
    rows[100::3] *= scale
    rows[:, 1] = 0.0
    assert state_values(summed(rows, backend)) == integers(rows)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_state_chunked_and_permuted_keeps_bits(chunk: int, backend: str) -> None:
    rows = from_bits(finite(np.random.default_rng(chunk), 65, 3))
    rows[5, 0], rows[6, 1], rows[7, 1] = math.nan, math.inf, -math.inf
    device = TRITON_DEVICE if backend == "triton" else "cpu"
    state = exact_sum.new(3, device)
    order = torch.randperm(65, generator=torch.Generator().manual_seed(chunk))
    for part in rows[order].to(device).split(chunk):
        state = exact_sum.add_rows(state, part, backend=backend)
    assert_same_bits(state.cpu(), summed(rows))


COLUMN = st.lists(st.floats(width=32), max_size=30)


# How fast a loaded machine draws examples says nothing of sums.
@hypothesis.settings(
    deadline=None, max_examples=200, derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)  # fmt: skip
@hypothesis.given(a=COLUMN, b=COLUMN, c=COLUMN, order=st.randoms())
def test_merge_any_grouping_holds_rational_sum(
    a: list[float], b: list[float], c: list[float], order: random.Random
) -> None:
    def state(values: list[float]) -> torch.Tensor:
        return summed(torch.tensor(values, dtype=torch.float32)[:, None])

    together = a + b + c
    order.shuffle(together)
    merged = exact_sum.merge(state(a), exact_sum.merge(state(b), state(c)))
    assert_same_bits(exact_sum.merge(exact_sum.merge(state(a), state(b)), state(c)), merged)
    assert_same_bits(state(together), merged)
    total = sum(Fraction(v) for v in together if math.isfinite(v))
    assert state_values(merged) == [total * 2**149]
    counts = sum(map(math.isnan, together)), together.count(math.inf), together.count(-math.inf)
    assert tuple(merged[10:, 0].tolist()) == counts


@pytest.mark.parametrize("backend", BACKENDS)
def test_merge_transposed_states_holds_both(backend: str) -> None:
    rows = from_bits(finite(np.random.default_rng(4), 6, 5))
    device = TRITON_DEVICE if backend == "triton" else "cpu"
    a, b = (summed(part).T.contiguous().T.to(device) for part in rows.split(3))
    merged = exact_sum.merge(a, b, backend=backend)
    assert state_values(merged) == integers(rows)
    assert_same_bits(
        round_on(a + b, torch.float32, backend), rounded(integers(rows), torch.float32)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_normalise_full_limbs_keeps_value(backend: str) -> None:
    # 2^31 - 1 pieces of 2^32 - 1, of one or of alternating sign.
    full = (2**31 - 1) * (2**32 - 1)
    state = torch.zeros(13, 4, dtype=torch.int64)
    state[:9] = torch.tensor([full, -full, full, -full])
    state[1:9:2, 2:] *= -1
    device = TRITON_DEVICE if backend == "triton" else "cpu"
    merged = exact_sum.merge(state.to(device), exact_sum.new(4, device), backend=backend).cpu()
    assert state_values(merged) == state_values(state)
    assert ((merged[:9] >= 0) & (merged[:9] < 2**32)).all()
    for dtype in DTYPES:
        assert_same_bits(round_on(state, dtype, backend), rounded(state_values(state), dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_round_added_states_of_many_ranks_is_nearest(backend: str) -> None:
    rows = from_bits(finite(np.random.default_rng(5), 3, 50)) * 2.0**-31
    state = summed(rows) * 2**30
    totals = [total * 2**30 for total in integers(rows)]
    for dtype in DTYPES:
        assert_same_bits(round_on(state, dtype, backend), rounded(totals, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_planned_rounding_equals_round_and_names_its_call(dtype, backend: str) -> None:
    device = TRITON_DEVICE if backend == "triton" else "cpu"
    rows = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(device)
    state = exact_sum.add_rows(exact_sum.new(5, device), rows, backend=backend)
    call = ("whole", "backward")
    plan = exact_sum.plan_round(torch.zeros(5, dtype=dtype, device=device), backend, call)
    with trace() as launches:
        got = plan(state)
    assert_same_bits(got, exact_sum.round(state, dtype, backend=backend))
    assert {(w.operator, w.direction, w.backend) for w in launches} == {(*call, backend)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_add_rows_any_strides_reads_the_right_elements(backend: str) -> None:
    base = from_bits(finite(np.random.default_rng(6), 70, 66))
    device = TRITON_DEVICE if backend == "triton" else "cpu"
    state = exact_sum.new(33, device)
    moved = base.to(device)
    views = (
        lambda t: t[::2, ::2],
        lambda t: t.T[1:, :33],
        lambda t: t[:1, :33].expand(9, 33),
    )
    for view in views:
        got = exact_sum.add_rows(state, view(moved), backend=backend)
        assert state_values(got) == integers(view(base).contiguous())
    assert not state.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_add_rows_lazily_negated_view_adds_its_values(backend: str) -> None:
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(5, 3, dtype=torch.complex64, generator=generator).conj().imag
    assert rows.is_neg()
    assert state_values(summed(rows, backend)) == integers(rows.resolve_neg())


def test_add_rows_more_than_one_slice_is_exact() -> None:
    tall = torch.ones(2**19 + 3, 1)
    assert state_values(summed(tall)) == [(2**19 + 3) << 149]
    wide = torch.full((5, 2**18), 3.0)
    assert_same_bits(exact_sum.round(summed(wide), torch.float32), torch.full((2**18,), 15.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_add_rows_nothing_leaves_an_empty_sum(backend: str) -> None:
    assert_same_bits(summed(torch.ones(0, 3), backend), torch.zeros(13, 3, dtype=torch.int64))
    assert summed(torch.ones(3, 0), backend).shape == (13, 0)
    assert round_on(exact_sum.new(0), torch.bfloat16, backend).shape == (0,)


STATE = exact_sum.new(3)
BAD_CALLS = {
    "columns must be a non-negative int, got -1": lambda: exact_sum.new(-1),
    "columns must be a non-negative int, got True": lambda: exact_sum.new(True),
    "state must be a tensor, got int": lambda: exact_sum.add_rows(
        0,  # type: ignore[arg-type]
        torch.ones(2, 3),
    ),
    "state must be int64, got float32": lambda: exact_sum.round(STATE.float(), torch.float32),
    "state must be [13, C], got [12, 3]": lambda: exact_sum.round(STATE[:12], torch.float32),
    "rows must be a dense tensor, got torch.sparse_coo": lambda: exact_sum.add_rows(
        STATE, torch.ones(2, 3).to_sparse()
    ),
    "rows must be float32, bfloat16 or float16, got float64": lambda: exact_sum.add_rows(
        STATE, torch.ones(2, 3, dtype=torch.float64)
    ),
    "rows must be [R, C] with C=3, got [2, 4]": lambda: exact_sum.add_rows(STATE, torch.ones(2, 4)),
    "rows must be [R, C] with C=3, got [3]": lambda: exact_sum.add_rows(STATE, torch.ones(3)),
    "rows must be on cpu like state, got meta": lambda: exact_sum.add_rows(
        STATE, torch.ones(2, 3, device="meta")
    ),
    "b must be [13, 3] like a, got [13, 4]": lambda: exact_sum.merge(STATE, exact_sum.new(4)),
    "b must be on cpu like a, got meta": lambda: exact_sum.merge(STATE, STATE.to("meta")),
    "dtype must be float32, bfloat16 or float16, got float64": lambda: exact_sum.round(
        STATE, torch.float64
    ),
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_call_bad_argument_names_it(message: str) -> None:
    with pytest.raises(ArgumentError) as error:
        BAD_CALLS[message]()
    assert str(error.value) == f"exact_sum: {message}"


def test_backend_unknown_name_is_refused() -> None:
    with pytest.raises(
        BackendError, match="must be one of 'auto', 'cuda', 'triton', 'golden', got 'fast'"
    ):
        exact_sum.merge(STATE, STATE, backend="fast")


def test_add_rows_that_want_a_gradient_are_refused_unless_none_is_recorded() -> None:
    rows = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(GradientError) as caught:
        exact_sum.add_rows(exact_sum.new(3), rows)
    assert str(caught.value) == (
        "exact_sum: rows must be without gradient, got requires_grad=True; detach it"
    )
    with torch.no_grad():
        state = exact_sum.add_rows(exact_sum.new(3), rows)
    assert exact_sum.round(state, torch.float32).tolist() == [2.0] * 3


@pytest.mark.parametrize("dtype", ["float32", [torch.float32], None, {}], ids=repr)
def test_round_dtype_of_another_type_is_refused(dtype: object) -> None:
    with pytest.raises(ArgumentError) as caught:
        exact_sum.round(exact_sum.new(3), dtype)
    assert str(caught.value) == (
        f"exact_sum: dtype must be float32, bfloat16 or float16, got {dtype}"
    )


@pytest.mark.parametrize("device", ["abacus", 1.5, ["cpu"]], ids=repr)
def test_new_device_that_torch_does_not_know_is_refused(device: object) -> None:
    with pytest.raises(ArgumentError) as caught:
        exact_sum.new(3, device)
    assert str(caught.value) == f"exact_sum: device must be a device of torch, got {device!r}"


@pytest.mark.parametrize("backend", ["", 0, ["golden"]], ids=repr)
def test_backend_that_is_no_name_is_refused(backend: object) -> None:
    with pytest.raises(BackendError, match="exact_sum: backend must be"):
        exact_sum.merge(exact_sum.new(3), exact_sum.new(3), backend=backend)
