# SPDX-License-Identifier: Apache-2.0
"""Rows of large batches on a GPU against the same rows in any other call."""

from dataclasses import replace

import pytest
import torch

from rlk.test_support.on_gpu import BACKENDS, DEVICE, assert_equal_bits
from rlk_qwen3next.conftest import EVERY_NORM
from rlk_qwen3next.test_norm_gpu_batches import (
    assert_rows,
    chunks,
    merged,
    part,
    random_batch,
    row_tensors,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # One worker: the batches of this file take a large part of a GPU's memory.
    pytest.mark.xdist_group("norm_sweeps"),
]

# (operator, rows, N): the sizes of the model.
FULL = [
    ("rms_norm_gated", 262144, 128),
    ("qwen3_next_rms_norm", 65536, 2048),
    ("rms_norm", 262144, 128),
    ("rms_norm_residual", 65536, 2048),
    ("rms_norm_residual_vllm", 65536, 2048),
]
BATCHES = (64, 257, 2048, 4097)
SUB_BATCHES = (2048, 4097, 32768, 65536, 131072)
# Calls of 1 and 7 rows are sampled: this many of each.
SAMPLED = 300
AROUND_POWERS = [
    n + side
    for n in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384, 32768, 65536)
    for side in (-1, 0, 1)
]
DENSE = [*range(1, 10), *AROUND_POWERS]
# The first batch whose elements a 32-bit index cannot count.
BEYOND_32_BITS = 2**31


@pytest.fixture
def named(request):
    """A norm by name, for parametrisation with sizes."""
    return request.getfixturevalue


@pytest.fixture(autouse=True)
def memory():
    """Gives memory back to the workers beside this one."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def sampled(size, rows, count=SAMPLED):
    """First rows of calls of `size` rows, spread over the batch with both ends."""
    last = rows - size
    return sorted({round(i * last / (count - 1)) for i in range(count)})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", EVERY_NORM)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_alone_equal_rows_of_batches(named, name, backend, dtype):
    norm, n = named(name), 128 if name == "rms_norm_gated" else 2048
    batch = random_batch(norm, max(BATCHES), n, dtype=dtype)
    largest = norm.results(batch, backend)
    alone = [norm.results(one, backend) for one in chunks(batch, 1)]
    for tensor in row_tensors(largest):
        singles = torch.cat([single[tensor] for single in alone])
        assert_equal_bits(singles, largest[tensor], f"{tensor} alone")
    assert_equal_bits(merged([s["state"] for s in alone], backend), largest["state"], "state")
    for size in BATCHES[:-1]:
        assert_rows(norm.results(part(batch, slice(size)), backend), largest, slice(size))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "rows", "n"), FULL)
def test_sub_batches_of_a_full_batch_equal_its_rows(named, name, rows, n, backend):
    norm = named(name)
    batch = random_batch(norm, rows, n)
    whole = norm.results(batch, backend)
    for size in SUB_BATCHES:
        states = []
        for start in range(0, rows, size):
            results = norm.results(part(batch, slice(start, start + size)), backend)
            assert_rows(results, whole, slice(start, start + size))
            states.append(results["state"])
        assert_equal_bits(merged(states, backend), whole["state"], f"state in parts of {size}")
    for size in (1, 7):
        for start in sampled(size, rows):
            taken = slice(start, start + size)
            assert_rows(norm.results(part(batch, taken), backend), whole, taken)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "n"), [("rms_norm_gated", 128), ("rms_norm", 256), ("rms_norm_residual", 256)]
)
def test_batches_of_every_boundary_size_equal_the_largest(named, name, n, backend):
    norm = named(name)
    batch = random_batch(norm, max(DENSE), n, seed=1)
    whole = norm.results(batch, backend)
    for size in DENSE:
        assert_rows(norm.results(part(batch, slice(size)), backend), whole, slice(size))


def leading_zeros(dy):
    """Half of the rows, the first ones, without an upstream gradient."""
    return torch.cat([torch.zeros_like(dy[: len(dy) // 2]), dy[len(dy) // 2 :]])


def scaled_rows(dy):
    """Rows apart by up to 80 binades."""
    generator = torch.Generator(DEVICE).manual_seed(5)
    scale = torch.randint(-40, 41, (len(dy), 1), generator=generator, device=DEVICE)
    return (dy.float() * scale.float().exp2()).to(dy.dtype)


def state(norm, batch, rstd, backend):
    """The exact state of dweight from a backward that computes nothing else."""
    return norm.backward(batch, rstd, backend, needs=("weight",))[-1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("data", [None, leading_zeros, scaled_rows])
def test_dweight_any_order_and_chunks_has_the_same_state(rms_norm_gated, data, backend):
    norm, rows = rms_norm_gated, 262144
    batch = random_batch(norm, rows, 128, seed=2)
    if data is not None:
        batch = replace(batch, upstream={"y": data(batch.upstream["y"])})
    rstd = norm.forward(batch, backend)[1]
    whole = state(norm, batch, rstd, backend)
    assert_equal_bits(norm.results(batch, backend)["state"], whole, "with other gradients")
    order = torch.randperm(rows, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(3))
    assert_equal_bits(state(norm, part(batch, order), rstd[order], backend), whole, "permuted")

    def in_chunks(first, last, size):
        return [
            state(norm, part(batch, slice(i, i + size)), rstd[i : i + size], backend)
            for i in range(first, last, size)
        ]

    for size in (4097, 65536):
        assert_equal_bits(merged(in_chunks(0, rows, size), backend), whole, f"chunks of {size}")
    # In the middle, where rows of zeros end.
    for size in (1, 7):
        first, last = rows // 2 - 100 * size, rows // 2 + SAMPLED * size
        ends = [slice(0, first), slice(last, rows)]
        states = [state(norm, part(batch, end), rstd[end], backend) for end in ends]
        states += in_chunks(first, last, size)
        assert_equal_bits(merged(states, backend), whole, f"chunks of {size}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "n"), [("rms_norm_gated", 128), ("qwen3_next_rms_norm", 2048)])
def test_more_elements_than_32_bits_count_equal_their_halves(named, name, n, backend):
    norm, rows = named(name), BEYOND_32_BITS // n + 3
    batch = random_batch(norm, rows, n, seed=4)
    whole = norm.results(batch, backend)
    states = []
    for half in (slice(0, rows // 2), slice(rows // 2, rows)):
        results = norm.results(part(batch, half), backend)
        assert_rows(results, whole, half)
        states.append(results["state"])
    assert_equal_bits(merged(states, backend), whole["state"], "state")
