# SPDX-License-Identifier: Apache-2.0
"""Threads, and settings of the process that would change bits."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rlk.compare import assert_same_bits
from rlk.errors import PlatformError

THREADS = 8


def test_eight_threads_together_have_the_bits_of_one(norm, backend):
    batches = [norm.batch(rows=33, n=257, seed=seed) for seed in range(THREADS)]
    expected = [norm.run(b.inputs, b.upstream["y"], backend) for b in batches]
    together = threading.Barrier(THREADS)
    repeats = 5 if backend == "golden" else 2

    def work(batch):
        together.wait()
        return [norm.run(batch.inputs, batch.upstream["y"], backend) for _ in range(repeats)]

    with ThreadPoolExecutor(THREADS) as pool:
        for runs, single in zip(pool.map(work, batches), expected, strict=True):
            for run in runs:
                for name, tensor in single.items():
                    assert_same_bits(run[name], tensor, name)


@pytest.fixture
def flushed():
    """This thread flushes subnormals until the end of the test."""
    if not torch.set_flush_denormal(True):
        pytest.skip("needs a processor that can flush subnormals")
    yield
    torch.set_flush_denormal(False)


def test_flushed_subnormals_are_refused_until_they_are_kept_again(norm, backend, flushed):
    batch = norm.batch()
    torch.set_flush_denormal(False)
    expected = norm.run(batch.inputs, batch.upstream["y"], backend)
    leaves = [tensor.detach().requires_grad_() for tensor in batch.inputs.values()]
    y = norm.call(leaves, backend)
    torch.set_flush_denormal(True)
    with pytest.raises(PlatformError, match="subnormal numbers must be kept, got them flushed"):
        norm.call(batch.inputs.values(), backend)
    with pytest.raises(PlatformError, match="subnormal numbers must be kept, got them flushed"):
        torch.autograd.grad(y, leaves, batch.upstream["y"], retain_graph=True)
    torch.set_flush_denormal(False)
    run = norm.run(batch.inputs, batch.upstream["y"], backend)
    for name, tensor in expected.items():
        assert_same_bits(run[name], tensor, name)
