# SPDX-License-Identifier: Apache-2.0
"""layer_norm_modulate among other work on a GPU: captures, streams, devices, memory, the host."""

import pytest
import torch

from rlk.bench.timing import peak_bytes
from rlk.test_support.gpu_process import (
    THREADS,
    assert_passes_in_fresh_process,
    assert_threads_have_bits_of_one,
    report_host_time,
)
from rlk.test_support.on_gpu import BACKENDS, assert_equal_bits
from rlk_qwenimage import layer_norm_modulate
from rlk_qwenimage.test_layer_norm_gpu_batches import assert_results, random_batch, results, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # One worker: memory and times are of a process that is not starved.
    pytest.mark.xdist_group("layer_norm_process"),
]


# The first call of a process, forward and backward, is captured.
CAPTURE = """
import sys, torch
from rlk.test_support.gpu_process import assert_replays_have_eager_bits
from rlk.test_support.on_gpu import draws
from rlk_qwenimage import layer_norm_modulate
backend, samples, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
normal = draws(seed=1)
x, dout = normal(samples, tokens, 3072), normal(samples, tokens, 3072)
leaves = [t.requires_grad_() for t in (x, normal(samples, 3072), normal(samples, 3072))]
def run():
    out = layer_norm_modulate(*leaves, backend=backend)
    return out, *torch.autograd.grad(out, leaves, dout)
assert_replays_have_eager_bits(run, (*leaves, dout), normal)
"""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("samples", "tokens"), [(1, 600), (300, 3)])
def test_first_call_of_a_process_in_a_capture_replays_its_bits(samples, tokens, backend):
    assert_passes_in_fresh_process(CAPTURE, backend, samples, tokens)


@pytest.mark.parametrize("backend", BACKENDS)
def test_eight_threads_on_eight_streams_have_the_bits_of_one(backend):
    batches = [random_batch(2, 501, 3072, seed=seed) for seed in range(THREADS)]

    def compare(found, expected):
        assert_results(found, expected, "among threads")

    assert_threads_have_bits_of_one(lambda batch: results(batch, backend), batches, compare)


@pytest.mark.parametrize("backend", BACKENDS)
def test_call_on_the_second_gpu_leaves_the_first_current(backend):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    batch = random_batch(2, 300, 3072)
    expected = train(batch, backend)
    with torch.cuda.device(0):
        found = train({name: t.to("cuda:1") for name, t in batch.items()}, backend)
        assert torch.cuda.current_device() == 0
    for name, tensor in found.items():
        assert tensor.device == torch.device("cuda:1")
        assert_equal_bits(tensor.to("cuda:0"), expected[name], name)


def held(*tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("samples", "tokens"), [(1, 6889), (2, 4096), (2048, 3)])
def test_peak_memory_is_tensors_of_the_call_and_two_percent(samples, tokens, backend):
    batch = random_batch(samples, tokens, 3072)
    leaves = [batch[name].requires_grad_() for name in ("x", "scale", "shift")]

    def step():
        out = layer_norm_modulate(*leaves, backend=backend)
        return out, *torch.autograd.grad(out, leaves, batch["dout"])

    peak, found = peak_bytes(step)
    # Two FP32 numbers of a token are saved.
    given, made = held(*batch.values()), held(*found) + 8 * samples * tokens
    print(f"{backend} {samples}x{tokens}: {peak - made} bytes beside {given + made}")
    if backend == "triton" and samples > 1:
        # States of as many samples as fit into 32 MiB.
        assert peak <= made + (32 << 20) + (given + made) // 50
    else:
        assert peak <= made + (given + made) // 50


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_host_time_of_an_eager_call_is_reported(backend, gradients, record_property):
    batch = random_batch(1, 8, 128)
    leaves = [batch[name].requires_grad_(gradients) for name in ("x", "scale", "shift")]

    def call():
        out = layer_norm_modulate(*leaves, backend=backend)
        return torch.autograd.grad(out, leaves, batch["dout"]) if gradients else out

    report_host_time(call, f"{backend} gradients={gradients}", record_property)
