# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings among other work on a GPU: captures, streams, threads, devices, the host."""

import pytest
import torch

from rlk.test_support.gpu_process import (
    THREADS,
    assert_passes_in_fresh_process,
    assert_threads_have_bits_of_one,
    report_host_time,
)
from rlk.test_support.on_gpu import BACKENDS, normal
from rlk_rope import multi_axis_rope, multi_axis_rope_qk
from rlk_rope.test_rope_gpu_batches import assert_results, run, run_qk, tables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # One worker: times are of a process that is not starved.
    pytest.mark.xdist_group("rope_process"),
]


# The first call of a process, forward and backward, is captured.
CAPTURE = """
import sys, torch, rlk_rope
from rlk.test_support.gpu_process import assert_replays_have_eager_bits
from rlk.test_support.on_gpu import draws
backend, second = sys.argv[1], sys.argv[2] == "second"
normal = draws(seed=1)
qkv, dq, dk = normal(2, 77, 3, 24, 128), normal(2, 77, 24, 128), normal(2, 77, 24, 128)
q, k = (qkv[:, :, i].detach().requires_grad_() for i in (0, 1))
angles = normal(77, 64).float()
cos, sin = angles.cos(), angles.sin()
dq.requires_grad_(second)
def train():
    outputs = rlk_rope.multi_axis_rope_qk(q, k, cos, sin, backend=backend)
    one = rlk_rope.multi_axis_rope(q, cos, sin, interleaved=False, backend=backend)
    gradients = torch.autograd.grad(outputs, (q, k), (dq, dk), create_graph=second)
    more = torch.autograd.grad(gradients[0], dq, dk) if second else ()
    return *outputs, one, *gradients, *more
assert_replays_have_eager_bits(train, (qkv, dq, dk), normal)
"""


@pytest.mark.parametrize("order", ["first", "second"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_first_call_of_a_process_in_a_capture_replays_its_bits(backend, order):
    assert_passes_in_fresh_process(CAPTURE, backend, order)


@pytest.mark.parametrize("backend", BACKENDS)
def test_eight_threads_on_eight_streams_have_the_bits_of_one(backend):
    calls = [(normal(2, 501, 24, 128, seed=s), normal(2, 501, 24, 128, seed=s + 50),
              *tables(501, 64, seed=s)) for s in range(THREADS)]  # fmt: skip

    def compare(found, expected):
        assert_results(found, expected, "among threads")

    assert_threads_have_bits_of_one(lambda call: run(*call, backend=backend), calls, compare)


@pytest.mark.parametrize("backend", BACKENDS)
def test_call_on_the_second_gpu_leaves_the_first_current(backend):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    call = (normal(2, 77, 4, 128), normal(2, 77, 4, 128, seed=1), *tables(77, 64))
    expected = run(*call, backend=backend)
    with torch.cuda.device(0):
        found = run(*(t.to("cuda:1") for t in call), backend=backend)
        assert torch.cuda.current_device() == 0
    assert {t.device for t in found} == {torch.device("cuda:1")}
    assert_results([t.to("cuda:0") for t in found], expected, "second GPU")


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_call_of_query_and_key_has_the_bits_of_eager(backend):
    torch._dynamo.reset()
    qkv = normal(2, 77, 3, 24, 128)
    given = (qkv[:, :, 0], qkv[:, :, 1], *(normal(2, 77, 24, 128, seed=s) for s in (1, 2)))
    cos, sin = tables(77, 64)
    expected = run_qk(*given, cos, sin, backend=backend)

    def call(q, k, cos, sin):
        return multi_axis_rope_qk(q, k, cos, sin, backend=backend)

    compiled = torch.compile(call, fullgraph=True)
    leaves = [t.detach().requires_grad_() for t in given[:2]]
    outputs = compiled(*leaves, cos, sin)
    gradients = torch.autograd.grad(outputs, leaves, given[2:])
    assert_results((*(t.detach() for t in outputs), *gradients), expected, "compiled")
    torch._dynamo.reset()


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_host_time_of_an_eager_call_is_reported(backend, gradients, record_property):
    x, dy, (cos, sin) = normal(1, 8, 24, 128), normal(1, 8, 24, 128, seed=1), tables(8, 64)
    x.requires_grad_(gradients)

    def call():
        y = multi_axis_rope(x, cos, sin, backend=backend)
        return torch.autograd.grad(y, x, dy) if gradients else y

    report_host_time(call, f"{backend} gradients={gradients}", record_property)
