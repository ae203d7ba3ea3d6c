# SPDX-License-Identifier: Apache-2.0
"""Both passes of dweight on a GPU: rows of unlike scales, few rows, and calls without a pause."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from rlk.compare import assert_same_bits
from rlk.exact_grad import new_carrier
from rlk.test_support.on_gpu import BACKENDS, BF16, assert_equal_bits, launches_of
from rlk_qwen3next import rms_norm
from rlk_qwen3next.test_norm_gpu_batches import assert_rows, part, random_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

NAMES = ("rms_norm", "rms_norm_gated", "rms_norm_residual")
# One block with 16 and with 32 lanes a row, rows of several chunks, and longer than registers hold.
COLUMNS = (8, 100, 128, 256, 300, 2048, 4096, 8200)
# Around the rows of one turn and of one block, and from where on a gate has a table.
FEW = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
FROM_TABLE = 65536
CALLS = 40


@pytest.fixture
def named(request):
    """A norm by name, for parametrisation with sizes."""
    return request.getfixturevalue


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Equal bits of two backends, which may write NaN differently."""
    assert_same_bits(actual.cpu(), expected.cpu(), what)


def half_zeros(dy: torch.Tensor) -> None:
    dy[: len(dy) // 2] = 0.0
    dy[::3, ::2] = -0.0


def alternating(dy: torch.Tensor) -> None:
    dy[::2] *= 2.0**40
    dy[1::2] *= 2.0**-40


def one_huge(dy: torch.Tensor) -> None:
    dy *= 2.0**-100
    dy[len(dy) // 2, 1], dy[-1, 1] = 2.0**100, -(2.0**100)


def opposite(dy: torch.Tensor) -> None:
    dy[::2] *= 2.0**60
    half = len(dy) // 2
    dy[half : 2 * half] = -dy[:half]


def not_finite(dy: torch.Tensor) -> None:
    dy[::7, 0], dy[1::5, 1], dy[2::5, 2] = torch.nan, torch.inf, -torch.inf


def far(dy: torch.Tensor) -> None:
    for first, power in enumerate((100, 0, -60, -120)):
        dy[first::4] *= 2.0**power


KINDS = (half_zeros, alternating, one_huge, opposite, not_finite)
# Rows that one kernel of Triton serves, by one worker: it compiles once for all tests of them.
every_row = pytest.mark.parametrize(
    ("name", "n"),
    [
        pytest.param(name, n, marks=pytest.mark.xdist_group(f"norm_passes_{name}_{n}"))
        for name in NAMES
        for n in COLUMNS
    ],
)


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@every_row
def test_states_of_unlike_rows_equal_those_of_triton(named, name, n, dtype):
    norm = named(name)
    for kind in KINDS:
        for rows in (40, 1001):
            batch = random_batch(norm, rows, n, dtype=dtype, seed=n)
            kind(batch.upstream["y"])
            cuda, triton = (norm.results(batch, backend) for backend in BACKENDS)
            for tensor in cuda:
                what = f"{tensor} {rows}x{n} {kind.__name__}"
                assert_equal(cuda[tensor], triton[tensor], what)


@every_row
def test_states_of_few_rows_equal_those_of_triton(named, name, n):
    norm = named(name)
    for rows in FEW:
        batch = random_batch(norm, rows, n, seed=rows)
        cuda, triton = (norm.results(batch, backend) for backend in BACKENDS)
        for tensor in cuda:
            assert_equal(cuda[tensor], triton[tensor], f"{tensor} {rows}x{n}")


@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["near", "far"])
@pytest.mark.parametrize("n", [8, 128, 136, 256])
def test_rows_with_a_table_equal_those_without_and_those_of_triton(rms_norm_gated, n, scale):
    """Gates from 80 on have no entry, nor zeros: at 30 times a normal value most warps meet one."""
    norm = rms_norm_gated
    batch = random_batch(norm, FROM_TABLE, n)
    batch.inputs["gate"] *= scale
    batch.inputs["gate"][5, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    batch.inputs["gate"][6] = 0.0
    batch.inputs["gate"][7, ::2] = -0.0
    found = {backend: norm.results(batch, backend) for backend in BACKENDS}
    for tensor in found["cuda"]:
        assert_equal(found["cuda"][tensor], found["triton"][tensor], tensor)
    rest = slice(1, None)
    assert_rows(norm.results(part(batch, rest), "cuda"), found["cuda"], rest)


@pytest.mark.parametrize("n", [128, 2048])
@pytest.mark.parametrize("name", NAMES)
def test_states_of_calls_without_a_pause_equal_those_alone(named, name, n):
    """A pass may come up while the one before it works, and shares its workspace with no other.

    Of long rows, the first pass adds what is far or not finite to the state that zeros come before.
    """
    norm, stream = named(name), torch.cuda.Stream()
    batches = [random_batch(norm, 50 + 97 * i, n, seed=i) for i in range(CALLS)]
    for batch in batches:
        far(batch.upstream["y"])
        not_finite(batch.upstream["y"][:7])
    rstds = [norm.forward(batch, "cuda") for batch in batches]
    torch.cuda.synchronize()

    def states(pause: bool) -> list[torch.Tensor]:
        found = []
        for batch, (*outputs, rstd) in zip(batches, rstds, strict=True):
            found.append(norm.backward(batch, rstd, "cuda", outputs=outputs)[-1])
            if pause:
                torch.cuda.synchronize()
        return found

    alone = states(pause=True)
    with torch.cuda.stream(stream):
        beside = [states(pause=False) for _ in range(3)]
    present = states(pause=False)
    torch.cuda.synchronize()
    for run in (*beside, present):
        for i, (actual, expected) in enumerate(zip(run, alone, strict=True)):
            assert_equal_bits(actual, expected, f"state of call {i}")


def test_long_rows_of_two_threads_do_not_lower_each_others_shared_memory():
    """Each call needs as much of it as its row is long."""
    rows = [torch.randn(2, n, device="cuda", dtype=BF16) for n in (9000, 90000)]
    wanted = [rms_norm(x, torch.ones_like(x[0]), backend="cuda") for x in rows]

    def calls(x: torch.Tensor, y: torch.Tensor) -> None:
        weight = torch.ones_like(x[0])
        for _ in range(300):
            assert_equal_bits(rms_norm(x, weight, backend="cuda"), y, f"{x.shape[1]} columns")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(calls, rows, wanted))


# (rows, columns, launches): one block; two passes; and zeros before those of longer rows.
LAUNCHES = ((1, 128, 1), (64, 128, 1), (1000, 128, 2), (5000, 256, 2), (300, 2048, 3))


@pytest.mark.parametrize(("rows", "columns", "count"), LAUNCHES, ids=str)
def test_backward_rounding_or_carrying_sums_takes_no_launch_of_its_own(rows, columns, count):
    x = torch.randn(rows, columns, device="cuda", dtype=BF16, requires_grad=True)
    weight = torch.randn(columns, device="cuda", dtype=BF16, requires_grad=True)
    carrier, dy = new_carrier(weight), torch.randn_like(x)
    for carriers in ((), (carrier,)):
        y = rms_norm(x, weight, weight_sum=next(iter(carriers), None), backend="cuda")
        leaves = [x, weight, *carriers]
        found = launches_of(partial(torch.autograd.grad, y, leaves, dy, retain_graph=True))
        assert len(found) == count, found
