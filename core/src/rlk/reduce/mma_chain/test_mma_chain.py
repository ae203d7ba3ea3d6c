# SPDX-License-Identifier: Apache-2.0
"""The product on every backend that runs here: values, places, arguments."""

import pytest
import torch

from rlk import interpreter
from rlk.compare import assert_same_bits
from rlk.errors import ArgumentError, BackendError, GradientError
from rlk.reduce import mma_chain
from rlk.reduce.mma_chain import hard_cases
from rlk.reduce.mma_chain.hard_cases import LAYOUTS, integers

# Before anything imports triton.
INTERPRETED = interpreter.enable_without_gpu()

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BACKENDS = ("golden", "triton") if INTERPRETED else ("golden",)
SHAPES = ((1, 1, 1), (3, 40, 64), (17, 9, 100), (37, 72, 16), (2, 33, 257))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_small_integers_is_exact(backend, dtype, layout, shape) -> None:
    case = integers(*shape, dtype)
    a, b = LAYOUTS[layout](case.a), LAYOUTS[layout](case.b)
    for bias, initial in ((None, None), (case.bias, None), (case.bias, case.initial)):
        given = {"bias": bias, "initial": initial}
        c = mma_chain.product(a, b, **given, dtype=torch.float32, backend=backend)
        assert_same_bits(c, case.expected(**given), layout)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", hard_cases.CASES, ids=lambda case: case.name)
def test_product_hard_case_gives_hand_answer(case, backend) -> None:
    expected = torch.tensor([[case.expected]], dtype=torch.float64).to(case.result)
    a, b = case.operands()
    c = mma_chain.product(a, b, **case.added(), dtype=case.result, backend=backend)
    assert_same_bits(c, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 0, 3), (0, 0, 0)], ids=str)
def test_product_without_elements_is_empty(backend, shape) -> None:
    m, n, k = shape
    c = mma_chain.product(torch.ones(m, k), torch.ones(n, k), backend=backend)
    assert (c.shape, c.dtype) == ((m, n), torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_product_expanded_and_negated_operands_give_their_values(backend) -> None:
    case = integers(1, 9, 24, torch.float32)
    a = case.a.expand(5, 24)
    generator = torch.Generator().manual_seed(7)
    b = torch.randint(-4, 5, (9, 24), generator=generator).to(torch.complex64).conj().imag
    assert b.is_neg()
    c = mma_chain.product(a, b, backend=backend)
    assert_same_bits(c, torch.zeros(5, 9))
    c = mma_chain.product(a, case.b, backend=backend)
    assert_same_bits(c, case.expected().expand(5, 9).contiguous())


def test_golden_element_does_not_see_the_shape_it_is_in() -> None:
    generator = torch.Generator().manual_seed(8)
    a, b = (torch.randn(n, 100, generator=generator).bfloat16() for n in (300, 2000))
    whole = mma_chain.product(a, b, dtype=torch.float32, backend="golden")
    part = mma_chain.product(a[7:8], b[5:60], dtype=torch.float32, backend="golden")
    assert_same_bits(whole[7:8, 5:60].contiguous(), part)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cut", [32, 64])
def test_product_continued_from_initial_keeps_bits(backend, cut) -> None:
    generator = torch.Generator().manual_seed(9)
    a, b = (torch.randn(n, 112, generator=generator).bfloat16() for n in (3, 20))
    whole = mma_chain.product(a, b, dtype=torch.float32, backend=backend)
    first = mma_chain.product(a[:, :cut], b[:, :cut], dtype=torch.float32, backend=backend)
    rest = mma_chain.product(
        a[:, cut:], b[:, cut:], initial=first, dtype=torch.float32, backend=backend
    )
    assert_same_bits(rest, whole)


A = torch.ones(2, 3)
BAD_CALLS = {
    "a must be a tensor, got int": lambda: mma_chain.product(0, A),
    "a must be a dense tensor, got torch.sparse_coo": lambda: mma_chain.product(A.to_sparse(), A),
    "a must be float32, bfloat16 or float16, got float64": lambda: mma_chain.product(A.double(), A),
    "a must be [M, K], got [3]": lambda: mma_chain.product(A[0], A),
    "b must be float32 like a, got bfloat16": lambda: mma_chain.product(A, A.bfloat16()),
    "b must be [N, K] with K=3, got [3, 2]": lambda: mma_chain.product(A, A.t()),
    "b must be on cpu like a, got meta": lambda: mma_chain.product(A, A.to("meta")),
    "bias must be [N] with N=2, got [3]": lambda: mma_chain.product(A, A, bias=A[0]),
    "bias must be float32, bfloat16 or float16, got int64": lambda: mma_chain.product(
        A, A, bias=A[:, 0].long()
    ),
    "initial must be [M, N] with M=2 and N=2, got [2, 3]": lambda: mma_chain.product(
        A, A, initial=A
    ),
    "initial must be float32, got bfloat16": lambda: mma_chain.product(
        A, A, initial=torch.ones(2, 2).bfloat16()
    ),
    "dtype must be float32, got bfloat16": lambda: mma_chain.product(A, A, dtype=torch.bfloat16),
    "dtype must be float32 or bfloat16 like a, got float16": lambda: mma_chain.product(
        A.bfloat16(), A.bfloat16(), dtype=torch.float16
    ),
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_product_bad_argument_names_it(message) -> None:
    with pytest.raises(ArgumentError) as caught:
        BAD_CALLS[message]()
    assert str(caught.value) == f"mma_chain: {message}"


def test_product_unknown_backend_is_refused() -> None:
    message = "must be one of 'auto', 'cuda', 'triton', 'golden', got 'fast'"
    with pytest.raises(BackendError, match=message):
        mma_chain.product(A, A, backend="fast")


def test_product_that_wants_a_gradient_is_refused_unless_none_is_recorded() -> None:
    b = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(GradientError) as caught:
        mma_chain.product(A, b)
    assert str(caught.value) == (
        "mma_chain: b must be without gradient, got requires_grad=True; detach it"
    )
    with torch.no_grad():
        assert mma_chain.product(A, b).tolist() == [[3.0, 3.0]] * 2


@pytest.mark.skipif(not INTERPRETED, reason="needs triton in its interpreter")
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("layout", ["k_major_padded", "row_major_padded", "unaligned"])
def test_every_tile_in_the_interpreter_forms_the_chain_of_golden(layout, dtype) -> None:
    from rlk.reduce.mma_chain import kernel_triton

    generator = torch.Generator().manual_seed(10)
    a, b = (torch.randn(n, 70, generator=generator).to(dtype) for n in (18, 35))
    bias = torch.randn(35, generator=generator)
    start = torch.randn(18, 35, generator=generator)
    want = mma_chain.product(a, b, bias=bias, initial=start, dtype=torch.float32, backend="golden")
    a, b = LAYOUTS[layout](a), LAYOUTS[layout](b)
    tiles = kernel_triton.candidates(a, b)
    assert len(tiles) > 2
    for tile in tiles:
        got = kernel_triton.product(a, b, bias, start, torch.float32, tile)
        assert_same_bits(got, want, str(tile))


def test_golden_of_float32_keeps_all_bits_of_a_step() -> None:
    a = torch.tensor([[1 + 2.0**-23, 1.0]])
    b = torch.tensor([[1 + 2.0**-23, -1.0]])
    # (1 + 2^-23)^2 - 1 = 2^-22 + 2^-46
    c = mma_chain.product(a, b, backend="golden")
    assert_same_bits(c, torch.tensor([[2.0**-22 + 2.0**-46]], dtype=torch.float64).float())


def test_float32_continued_from_a_block_keeps_bits() -> None:
    generator = torch.Generator().manual_seed(12)
    a, b = (torch.randn(n, 112, generator=generator) for n in (3, 20))
    whole = mma_chain.product(a, b, backend="golden")
    first = mma_chain.product(a[:, :64], b[:, :64], backend="golden")
    rest = mma_chain.product(a[:, 64:], b[:, 64:], initial=first, backend="golden")
    assert_same_bits(rest, whole)


def test_tables_every_size_finds_a_tile_and_fp32_its_block() -> None:
    from rlk.reduce.mma_chain import tiles

    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        for by_tma, fp32 in ((True, True), (True, False), (False, True), (False, False)):
            table = tiles.table_for(capability, by_tma=by_tma)
            allowed = table.candidates(fp32=fp32)
            for m, n, k in ((1, 1, 0), (1, 6144, 3072), (2048, 18432, 3072), (6144, 3072, 1)):
                assert table.choose(m, n, k, fp32=fp32) in allowed
            assert not fp32 or {t.k for t in allowed} == {tiles.FP32_BLOCK}
            # A second accumulator is read by a descriptor of its own.
            assert by_tma or not any(t.n2 or t.waves for t in allowed)
            # From 64 rows on Triton compiles to tcgen05 there.
            assert capability != (10, 0) or max(t.m for t in allowed) < 64
