# SPDX-License-Identifier: Apache-2.0
"""Norms among other work on a GPU: graph captures, streams, threads, devices, memory, the host."""

import pytest
import torch

from rlk.bench.timing import held_bytes, peak_bytes
from rlk.parts import tensors_in
from rlk.test_support.gpu_process import (
    THREADS,
    assert_passes_in_fresh_process,
    assert_threads_have_bits_of_one,
    report_host_time,
)
from rlk.test_support.on_gpu import BACKENDS, assert_equal_bits
from rlk_qwen3next.test_norm_gpu_batches import random_batch, row_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # One worker: memory and times are of a process that is not starved.
    pytest.mark.xdist_group("norm_process"),
]

NAMES = ("rms_norm_gated", "rms_norm", "qwen3_next_rms_norm")
# The variants share a process, which takes longer to start than they take.
CAPTURED = (*NAMES, "rms_norm_residual+rms_norm_vllm+rms_norm_residual_vllm")

# The first call of a process, forward and backward, is captured. Of several norms, each in turn:
# its kernels are first met there.
CAPTURE = """
import sys, torch, rlk_qwen3next
from rlk.test_support.gpu_process import assert_replays_have_eager_bits
from rlk.test_support.on_gpu import draws
names, backend = sys.argv[1].split("+"), sys.argv[2]
normal = draws(seed=1)
def run():
    outputs = norm(*leaves, backend=backend)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return *outputs, *torch.autograd.grad(outputs, leaves, upstream)
for name in names:
    norm, summed = getattr(rlk_qwen3next, name), "residual" in name
    count = 2 if summed or name.endswith("gated") else 1
    leaves = [normal(300, 128).requires_grad_() for _ in range(count)]
    leaves.append(normal(128).requires_grad_())
    upstream = [normal(300, 128) for _ in range(2 if summed else 1)]
    print(name)
    assert_replays_have_eager_bits(run, (*leaves, *upstream), normal)
"""


@pytest.fixture(params=NAMES)
def norm(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CAPTURED)
def test_first_call_of_a_process_in_a_capture_replays_its_bits(name, backend):
    assert_passes_in_fresh_process(CAPTURE, name, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_eight_threads_on_eight_streams_have_the_bits_of_one(norm, backend):
    batches = [random_batch(norm, 3001, 256, seed=seed) for seed in range(THREADS)]

    def compare(found, expected):
        for name, tensor in expected.items():
            assert_equal_bits(found[name], tensor, name)

    assert_threads_have_bits_of_one(lambda batch: norm.results(batch, backend), batches, compare)


@pytest.mark.parametrize("backend", BACKENDS)
def test_call_on_the_second_gpu_leaves_the_first_current(norm, backend):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    batch = random_batch(norm, 300, 128)
    expected = norm.results(batch, backend)
    there = [{n: t.to("cuda:1") for n, t in d.items()} for d in (batch.inputs, batch.upstream)]
    with torch.cuda.device(0):
        run = norm.run(there[0], there[1]["y"], backend)
        assert torch.cuda.current_device() == 0
    for name in set(run) & set(row_tensors(expected)):
        assert run[name].device == torch.device("cuda:1")
        assert_equal_bits(run[name].to("cuda:0"), expected[name], name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "rows", "n"),
    [
        ("rms_norm_gated", 262144, 128),
        ("qwen3_next_rms_norm", 65536, 2048),
        ("rms_norm_residual", 65536, 2048),
    ],
)
def test_peak_memory_is_outputs_and_gradients_and_two_percent(request, name, rows, n, backend):
    norm = request.getfixturevalue(name)
    batch = random_batch(norm, rows, n)
    leaves = [t.requires_grad_() for t in batch.inputs.values()]
    norm.call([t[:64] if t.dim() > 1 else t for t in leaves], backend)

    def step():
        outputs = tensors_in(norm.call(leaves, backend))
        return *outputs, *torch.autograd.grad(outputs, leaves, list(batch.upstream.values()))

    peak, results = peak_bytes(step)
    allowed = held_bytes(results) * 1.02
    print(f"{name} {backend}: peak {peak} bytes, outputs and gradients {held_bytes(results)}")
    assert peak <= allowed


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_host_time_of_an_eager_call_is_reported(norm, backend, gradients, record_property):
    batch = random_batch(norm, 8, 128)
    leaves = [t.requires_grad_(gradients) for t in batch.inputs.values()]
    dy = batch.upstream["y"]

    def call():
        y = norm.call(leaves, backend)
        return torch.autograd.grad(y, leaves, dy) if gradients else y

    report_host_time(call, f"{norm.name} {backend} gradients={gradients}", record_property)
