# SPDX-License-Identifier: Apache-2.0
"""Products on a GPU: hand answers, equal bits of CUDA and Triton, large and captured calls."""

import pytest
import torch

from rlk.compare import assert_same_bits
from rlk.errors import BackendError
from rlk.reduce import mma_chain
from rlk.reduce.mma_chain import hard_cases
from rlk.reduce.mma_chain.hard_cases import LAYOUTS, integers
from rlk.reduce.mma_chain.operands import operand
from rlk.test_support.on_gpu import assert_equal_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
# One worker for what Triton compiles for many tests, and for products that take gigabytes.
one_worker = pytest.mark.xdist_group("mma_chain")
BACKENDS = ("cuda", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1, 1), (3, 40, 64), (17, 9, 100), (70, 33, 257), (300, 200, 520), (2050, 130, 48))


def spread(rows: int, k: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers over 2^-12 to 2^12 and more."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(rows, k, generator=generator) * 24 - 12
    return (torch.randn(rows, k, generator=generator) * size.exp2()).to(dtype)


@one_worker
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_product_small_integers_is_exact(backend, dtype, layout) -> None:
    for shape in SHAPES:
        case = integers(*shape, dtype)
        a, b = (LAYOUTS[layout](t.cuda()) for t in (case.a, case.b))
        for bias, initial in ((None, None), (case.bias, case.initial)):
            there = [None if t is None else t.cuda() for t in (bias, initial)]
            given = {"bias": there[0], "initial": there[1], "dtype": torch.float32}
            c = mma_chain.product(a, b, **given, backend=backend)
            assert_same_bits(c.cpu(), case.expected(bias, initial), f"{shape} {layout}")


@one_worker
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", hard_cases.CASES, ids=lambda case: case.name)
def test_product_hard_case_gives_hand_answer(case, backend) -> None:
    expected = torch.tensor([[case.expected]], dtype=torch.float64).to(case.result)
    a, b = (t.cuda() for t in case.operands())
    given = {name: None if t is None else t.cuda() for name, t in case.added().items()}
    c = mma_chain.product(a, b, **given, dtype=case.result, backend=backend)
    assert_same_bits(c.cpu(), expected)


@one_worker
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_product_of_cuda_and_triton_has_equal_bits(dtype, layout) -> None:
    for m, n, k in ((1, 200, 3072), (17, 200, 3072), (64, 136, 1000), (300, 260, 3072)):
        a, b = (LAYOUTS[layout](spread(r, k, dtype, seed=r).cuda()) for r in (m, n))
        bias = spread(n, 1, torch.float32, seed=1)[:, 0].cuda()
        found = [
            mma_chain.product(a, b, bias=bias, dtype=torch.float32, backend=backend)
            for backend in BACKENDS
        ]
        assert_same_bits(*found, f"{m} {n} {k}")


# Copies of a and of b: each way in which a kernel reads the two.
READS = {
    "forward": ("k_major_padded", "k_major_padded"),
    "row_gradient": ("k_major_padded", "row_major_padded"),
    "parameter_gradient": ("row_major_padded", "row_major_padded"),
    "turned_over": ("row_major_padded", "k_major_padded"),
    "unaligned": ("unaligned", "unaligned"),
}


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias_dtype", [None, *DTYPES], ids=str)
def test_product_by_every_tile_has_the_bits_of_the_first(dtype, reads, bias_dtype) -> None:
    cuda = mma_chain.backend_module("cuda")
    # 1 to more than any tile, no multiples of one; N whole and not in words of 16 bytes.
    for m, n, k in ((1, 200, 72), (65, 1040, 16), (300, 402, 1000), (513, 33, 1)):
        a, b = (
            LAYOUTS[layout](spread(rows, k, dtype, seed=rows).cuda())
            for layout, rows in zip(READS[reads], (m, n), strict=True)
        )
        bias = None if bias_dtype is None else spread(2 * n, 1, bias_dtype, 1)[::2, 0].cuda()
        start = spread(n, m, torch.float32, seed=2).cuda().t()
        for initial in (None, start, start.contiguous()):
            for out in {dtype, torch.float32}:
                first, *others = cuda.candidates(a, b)
                want = cuda.product(a, b, bias, initial, out, first)
                for tile in others:
                    # Again: a race shows as bits that move.
                    for _ in range(3):
                        got = cuda.product(a, b, bias, initial, out, tile)
                        assert_equal_bits(got, want, f"{m} {n} {k} {out} {tile}")


# K of 1, 2 and 6 stages; M and N of several tiles for every cluster of a GPU, at their edges too.
@pytest.mark.parametrize("k", [16, 100, 330])
@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_product_of_several_tiles_a_block_has_the_bits_of_the_first(dtype, reads, k) -> None:
    cuda = mma_chain.backend_module("cuda")
    m, n = 5000, 5016
    a, b = (
        LAYOUTS[layout](spread(rows, k, dtype, seed=rows).cuda())
        for layout, rows in zip(READS[reads], (m, n), strict=True)
    )
    first, *others = cuda.candidates(a, b)
    for bias in (None, spread(n, 1, dtype, 1)[:, 0].cuda()):
        want = cuda.product(a, b, bias, None, dtype, first)
        for tile in others:
            # Again: blocks that wait for one another do so in another order.
            for _ in range(10):
                got = cuda.product(a, b, bias, None, dtype, tile)
                assert_equal_bits(got, want, f"{tile}, bias {bias is not None}")


@pytest.mark.parametrize("case", hard_cases.CASES, ids=lambda case: case.name)
def test_product_hard_case_by_every_tile_gives_hand_answer(case) -> None:
    cuda = mma_chain.backend_module("cuda")
    expected = torch.tensor([[case.expected]], dtype=torch.float64).to(case.result)
    a, b = (LAYOUTS["k_major_padded"](t.cuda()) for t in case.operands())
    given = {name: None if t is None else t.cuda() for name, t in case.added().items()}
    for tile in cuda.candidates(a, b):
        c = cuda.product(a, b, given["bias"], given["initial"], case.result, tile)
        assert_same_bits(c.cpu(), expected, str(tile))


def test_candidates_on_hopper_have_clusters_for_what_tma_reads() -> None:
    hopper = torch.cuda.get_device_capability() == (9, 0)
    cuda = mma_chain.backend_module("cuda")
    for layouts in READS.values():
        a, b = (LAYOUTS[layout](spread(24, 64, torch.bfloat16, 1).cuda()) for layout in layouts)
        by_tma = operand(a).tma and operand(b).tma
        assert any(t.cluster for t in cuda.candidates(a, b)) == (hopper and by_tma)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
def test_tile_of_wgmma_where_tma_cannot_read_is_refused() -> None:
    # A binary without wgmma for this GPU would form the tile by mma.sync instead.
    cuda = mma_chain.backend_module("cuda")
    a = spread(24, 64, torch.bfloat16, 1).cuda()
    (tile, *_) = [tile for tile in cuda.candidates(a, a) if tile.cluster]
    a = LAYOUTS["unaligned"](a)
    with pytest.raises(BackendError, match="must run mma_chain.product, got CUDA error 1:"):
        cuda.product(a, a, None, None, torch.bfloat16, tile)


@one_worker
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_product_value_is_within_the_error_of_a_chain(backend, dtype) -> None:
    a, b = spread(33, 3072, dtype, seed=2).cuda(), spread(130, 3072, dtype, seed=3).cuda()
    c = mma_chain.product(a, b, dtype=torch.float32, backend=backend).double()
    wide = a.double(), b.double()
    size = wide[0].abs() @ wide[1].abs().t()
    # Each of the 3072 products is cut at most once to the accumulator's last bit, or split.
    bound = 3072 * torch.finfo(torch.float32).eps * size
    assert ((c - wide[0] @ wide[1].t()).abs() <= bound).all()


@one_worker
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [3072, 6144, 18432])
@pytest.mark.parametrize("positive", [False, True], ids=["signed", "positive"])
def test_product_of_float32_error_does_not_grow_with_k(backend, k, positive) -> None:
    generator = torch.Generator().manual_seed(k)
    a, b = (torch.randn(n, k, generator=generator).cuda() for n in (33, 200))
    # Of one sign: what truncation takes away adds up.
    a, b = (a.abs(), b.abs()) if positive else (a, b)
    c = mma_chain.product(a, b, backend=backend).double()
    wide = a.double(), b.double()
    size = wide[0].abs() @ wide[1].abs().t()
    # 25: 3e-6, a fifth of what one accumulator over 3072 of K drifts by.
    bound = 25 * torch.finfo(torch.float32).eps * size
    assert ((c - wide[0] @ wide[1].t()).abs() <= bound).all()


@one_worker
@pytest.mark.parametrize("backend", BACKENDS)
def test_product_beyond_two_to_the_31_elements_reaches_the_last(backend) -> None:
    # 131080 x 16400 elements of b, then 65544 x 32776 of the result.
    b = torch.zeros(131080, 16400, dtype=torch.bfloat16, device="cuda")
    b[-1, -3:] = 1.0
    a = torch.ones(2, 16400, dtype=torch.bfloat16, device="cuda")
    c = mma_chain.product(a, b, backend=backend)
    assert c[:, -1].tolist() == [3.0, 3.0]
    assert not c[:, :-1].any()
    c = mma_chain.product(b[:17].t(), b[:17].t()[:8], backend=backend)
    assert c.shape == (16400, 8)
    del b, c
    a = torch.zeros(65544, 16, dtype=torch.bfloat16, device="cuda")
    a[-1] = 1.0
    c = mma_chain.product(a, a[-32776:], backend=backend)
    assert (c[-1, -1].item(), c[-1, 0].item(), c[0, -1].item()) == (16.0, 0.0, 0.0)


@one_worker
@pytest.mark.parametrize("backend", BACKENDS)
def test_product_captured_in_a_graph_gives_the_bits_of_eager(backend) -> None:
    for m in (1, 40, 500):
        a, b = spread(m, 256, torch.bfloat16, 4).cuda(), spread(384, 256, torch.bfloat16, 5).cuda()
        eager = mma_chain.product(a, b, backend=backend)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = mma_chain.product(a, b, backend=backend)
        captured.zero_()
        graph.replay()
        assert_same_bits(captured.cpu(), eager.cpu())


@one_worker
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 0, 3), (0, 0, 0)], ids=str)
def test_product_without_elements_is_empty(backend, shape) -> None:
    m, n, k = shape
    a, b = torch.ones(m, k, device="cuda"), torch.ones(n, k, device="cuda")
    assert mma_chain.product(a, b, backend=backend).shape == (m, n)
