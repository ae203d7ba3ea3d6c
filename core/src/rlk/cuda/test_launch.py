# SPDX-License-Identifier: Apache-2.0
"""Calls through the struct into a binary whose launchers compute on the host."""

import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import rlk
from rlk import backends, launch
from rlk.compare import assert_same_bits
from rlk.cuda import build, probe
from rlk.cuda import launch as cuda_launch
from rlk.cuda import steps as steps_module
from rlk.errors import ArgumentError, BackendError
from rlk.execution import Execution
from rlk.operator import Backend
from rlk.reduce.exact_sum import kernel_cuda
from rlk.reduce.exact_sum.form import SumForm

# What forward and backward compute by hand: y = x * weight + shift, first = x[:, 0],
# dx = dy * weight, and a "state" of first + dy[0] and, through the workspace, the row numbers.
HOST = """// SPDX-License-Identifier: Apache-2.0
#include "rlk_demo.h"

static float at(const void* data, long long index) { return ((const float*)data)[index]; }

RLK_EXPORT int rlk_demo_forward(const DemoForward* a) {
    if (a->mode == MODE_NEGATED) return cudaErrorInvalidValue;
    if (a->x_dtype != rlk::kFloat32 || a->weight_dtype != rlk::kFloat32) return 1000 + a->x_dtype;
    if (a->device != -1 || a->stream != (void*)4096) return cudaErrorInvalidDevice;
    for (long long t = 0; t < a->T; ++t) {
        for (long long n = 0; n < a->N; ++n) {
            float x = at(a->x, t * a->x_stride_T + n * a->x_stride_N);
            float y = x * at(a->weight, n * a->weight_stride_N) + a->shift;
            ((float*)a->y)[t * a->N + n] = y;
            if (n == 0) ((float*)a->first)[t] = x;
        }
    }
    return 0;
}

RLK_EXPORT long long rlk_demo_backward_workspace(const DemoBackward* a) { return 8 * a->T; }

RLK_EXPORT int rlk_demo_backward(const DemoBackward* a) {
    long long* rows = (long long*)a->workspace;
    for (long long t = 0; t < a->T; ++t) rows[t] = t;
    for (long long n = 0; n < a->N; ++n) {
        for (long long t = 0; a->dx && t < a->T; ++t) {
            float dy = at(a->dy, t * a->dy_stride_T + n * a->dy_stride_N);
            ((float*)a->dx)[t * a->N + n] = dy * at(a->weight, n * a->weight_stride_N);
        }
        for (long long k = 0; a->dweight_state && k < 13; ++k) {
            float sum = at(a->first, a->first_stride_T) + at(a->dy, n * a->dy_stride_N);
            long long digit = (long long)sum + rows[a->T - 1] + a->mode;
            if (a->dweight_form == 2) ((double*)a->dweight_state)[k * a->N + n] = digit + 0.5;
            else a->dweight_state[k * a->N + n] = digit;
        }
        if (a->dweight_sums) ((float*)a->dweight_sums)[n] = a->dweight_form * 10 + n;
    }
    return 0;
}
"""
WEIGHT = torch.tensor([2.0, -3.0, 0.5])
# Of CPU tensors, as torch numbers it; these calls have no GPU.
HERE = -1


@pytest.fixture(scope="module")
def host(needs_nvcc, tmp_path_factory, request):
    """The demo's backend module over the host source, loaded for the CPU."""
    folder = tmp_path_factory.mktemp("host")
    source = folder / "kernel_cuda.cu"
    source.write_text(HOST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(build.CACHE_VARIABLE, str(folder / "cache"))
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        patch.setattr(cuda_launch, "current_stream", lambda device: 4096)
        patch.setattr(probe, "require", lambda library, device: None)
        module = cuda_launch.module(request.getfixturevalue("demo"), source)
        module._loaded[HERE] = module.load(0)
        yield module


def by_hand(x, shift):
    """The outputs, one element after another."""
    rows = [[float(v) * float(w) + shift for v, w in zip(r, WEIGHT, strict=True)] for r in x]
    return torch.tensor(rows), torch.tensor([float(row[0]) for row in x])


def test_forward_strided_inputs_are_read_by_their_strides(host):
    x = torch.arange(24.0).reshape(3, 8)[:, ::3].t().flip(0).contiguous().t()[:2]
    weight = torch.stack([WEIGHT, WEIGHT + 1], 1)[:, 0]
    assert x.stride() == (1, 3)
    assert weight.stride() == (2,)
    y, first = host.forward(x, weight, shift=0.25, mode="plain")
    expected = by_hand(x, 0.25)
    assert torch.equal(y, expected[0])
    assert torch.equal(first, expected[1])
    assert y.is_contiguous()


def test_backward_all_needed_gives_gradient_and_state(host):
    dy = torch.ones(1).expand(2, 3)
    x = torch.tensor([[1.0, 2.0, 3.0], [40.0, 5.0, 6.0]])
    first = x[:, 0]
    dx, state = host.backward(
        dy, x, WEIGHT, first, needs=frozenset({"x", "weight"}), shift=0.0, mode="negated"
    )
    assert torch.equal(dx, WEIGHT.expand(2, 3))
    # first[1] + dy + last row number + index of the choice
    assert torch.equal(state, torch.full((13, 3), 40 + 1 + 1 + 1))


def test_backward_sum_in_each_form_is_what_the_launcher_was_asked_for(host, monkeypatch):
    monkeypatch.setattr(host, "finishes_sums", True)
    x = torch.tensor([[1.0, 2.0, 3.0], [40.0, 5.0, 6.0]])
    options = {"needs": frozenset({"x", "weight"}), "shift": 0.0, "mode": "plain"}
    run = partial(host.backward, torch.ones(2, 3), x, WEIGHT, x[:, 0], **options)
    # first[1] + dy + last row number
    digits = torch.full((13, 3), 40 + 1 + 1)
    dx, state = run()
    assert torch.equal(dx, WEIGHT.expand(2, 3))
    assert_same_bits(state, digits)
    _, sums = run(forms={"weight": SumForm.ROUNDED})
    assert_same_bits(sums, torch.tensor([10.0, 11.0, 12.0]))
    _, (state, zeros) = run(forms={"weight": SumForm.CARRIED})
    assert_same_bits(state, digits + torch.tensor(0.5, dtype=torch.float64))
    assert_same_bits(zeros, torch.tensor([20.0, 21.0, 22.0]))


def test_backward_gradient_of_rows_goes_into_the_memory_that_is_given(host):
    x, into = torch.ones(2, 3), torch.zeros(2, 3)
    options = {"needs": frozenset({"x"}), "shift": 0.0, "mode": "plain"}
    dx, _ = host.backward(x, x, WEIGHT, x[:, 0], into={"x": into}, **options)
    assert dx is into
    assert torch.equal(into, WEIGHT.expand(2, 3))


@pytest.mark.parametrize("needs", [{"x"}, {"weight"}, set()])
def test_backward_gradient_that_is_not_needed_is_none(host, needs):
    x = torch.ones(2, 3)
    results = host.backward(x, x, WEIGHT, x[:, 0], needs=frozenset(needs), shift=0.0, mode="plain")
    assert [r is not None for r in results] == ["x" in needs, "weight" in needs]


def test_forward_launcher_that_fails_raises_the_runtime_text(host):
    with pytest.raises(BackendError) as raised:
        host.forward(torch.ones(2, 3), WEIGHT, shift=0.0, mode="negated")
    assert str(raised.value) == (
        'demo: backend "cuda" must run demo_forward, got CUDA error 1: invalid argument'
    )


@pytest.mark.parametrize(("dtype", "code"), [(torch.bfloat16, 1), (torch.float16, 2)])
def test_forward_dtypes_reach_the_launcher_as_codes(host, dtype, code):
    with pytest.raises(BackendError, match=f"got CUDA error {1000 + code}"):
        host.forward(torch.ones(2, 3, dtype=dtype), WEIGHT, shift=0.0, mode="plain")


def test_calls_in_a_trace_name_kernel_and_binary(host):
    x = torch.ones(2, 3)
    host.forward(x, WEIGHT, shift=0.0, mode="plain")
    with rlk.trace() as launches:
        host.forward(x, WEIGHT, shift=0.0, mode="plain")
        host.backward(x, x, WEIGHT, x[:, 0], needs=frozenset({"x"}), shift=0.0, mode="plain")
    digest = build.read_manifest(host.binary("sm_90").parent)["digest"]
    assert launches == [
        launch.Launch("", "", "cuda", "demo_forward", digest),
        launch.Launch("", "", "cuda", "demo_backward", digest),
    ]


def test_forward_negated_view_is_refused(host):
    negated = torch.complex(torch.ones(2, 3), torch.ones(2, 3)).conj().imag
    with pytest.raises(ArgumentError, match="demo: x must be a plain tensor .* a negated view"):
        host.forward(negated, WEIGHT, shift=0.0, mode="plain")


def test_forward_cpu_tensors_in_a_real_module_are_refused(demo, source):
    module = cuda_launch.KernelModule(demo, source)
    with pytest.raises(ArgumentError, match="demo: x must be on an NVIDIA GPU"):
        module.forward(torch.ones(2, 3), WEIGHT, shift=0.0, mode="plain")


def test_module_asked_twice_is_one_object(demo, source):
    module = cuda_launch.module(demo, source)
    assert cuda_launch.module(demo, source) is module
    assert cuda_launch.module(replace(demo), source) is not module


def test_backend_row_without_nvcc_and_binary_says_what_there_is(
    demo, source, cache, tmp_path, monkeypatch
):
    module = cuda_launch.module(demo, source)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    lack = (
        "of prebuilt kernels, this installation brings none; it needs nvcc 12.8 or newer, "
        "got none; set CUDA_HOME or choose another backend"
    )
    assert backends.cuda(lambda: module).missing("nvidia") == lack
    composed = SimpleNamespace(launches=(module,))
    assert backends.cuda(lambda: composed).missing("nvidia") == lack
    assert backends.cuda(SimpleNamespace).missing("nvidia") is None


def test_backend_row_without_cuda_torch_says_so(monkeypatch):
    row = backends.cuda(lambda: None)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert row.missing("nvidia") == "it needs a torch built for CUDA, got one without"
    assert (row.platforms, row.on_request) == (("nvidia",), ())


@pytest.fixture
def execution(host, demo):
    """The demo on the host library, as an operator runs it."""
    return Execution(replace(demo, backends=(Backend("cuda", lambda: host, ("cpu",)),)))


LAYOUTS = {
    "rows": lambda x: x,
    "one row": lambda x: x[0],
    "leading axes": lambda x: x.view(2, 2, 3),
    "strided leading axes": lambda x: torch.stack([x.view(2, 2, 3)] * 2, 3)[..., 1],
    "axes that flatten only by a copy": lambda x: x.view(2, 2, 3).transpose(0, 1),
    "negated view": lambda x: torch.complex(x, -x).conj().imag,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_execution_any_layout_equals_the_formula_by_hand(execution, layout):
    for shift in (0.25, 2.0):
        x = LAYOUTS[layout](torch.arange(12.0).view(4, 3) + shift)
        y, first = execution.forward(x, WEIGHT, shift, "plain", "cuda")
        expected = by_hand(x.reshape(-1, 3).resolve_neg(), shift)
        assert torch.equal(y, expected[0].view(x.shape))
        assert torch.equal(first, expected[1].view(x.shape[:-1]))
        assert y.is_contiguous()


def test_execution_backward_of_each_layout_equals_the_formula_by_hand(execution):
    for layout in LAYOUTS.values():
        dy = layout(torch.arange(12.0).view(4, 3))
        x = torch.ones(dy.shape)
        arguments = (dy, x, WEIGHT, x[..., 0], 0.0, "plain")
        dx, state = execution.backward(*arguments, True, False, "cuda")
        assert torch.equal(dx, dy.resolve_neg() * WEIGHT)
        assert state.numel() == 0


@pytest.mark.parametrize("layout", ["rows", "axes that flatten only by a copy"])
def test_execution_gradients_of_a_backend_that_finishes_sums_are_as_it_left_them(
    host, demo, layout, monkeypatch
):
    monkeypatch.setattr(host, "finishes_sums", True)
    finishing = Execution(replace(demo, backends=(Backend("cuda", lambda: host, ("cpu",)),)))
    dy = LAYOUTS[layout](torch.arange(12.0).view(4, 3))
    tensors = (dy, torch.ones(dy.shape), WEIGHT, torch.ones(dy.shape[:-1]))
    for _ in range(2):
        dx, dweight = finishing.input_gradients(tensors, (0.0, "plain"), (True, True), "cuda")
        assert torch.equal(dx, dy * WEIGHT)
        assert_same_bits(dweight, torch.tensor([10.0, 11.0, 12.0]))
        forms = (SumForm.STATE, SumForm.CARRIED)
        _, (state, zeros) = finishing.run_backward(
            tensors, (0.0, "plain"), (True, True), "cuda", None, forms
        )
        assert (state.shape, state.dtype) == ((13, 3), torch.float64)
        assert_same_bits(zeros, torch.tensor([20.0, 21.0, 22.0]))


def test_execution_in_a_trace_names_operator_and_direction(execution):
    x = torch.ones(2, 3)
    arguments = (x, WEIGHT, 0.0, "plain", "cuda")
    execution.forward(*arguments)
    with rlk.trace() as launches:
        execution.forward(*arguments)
        execution.backward(x, x, WEIGHT, x[:, 0], 0.0, "plain", True, True, "cuda")
    assert [(one.operator, one.direction, one.kernel) for one in launches] == [
        ("demo", "forward", "demo_forward"), ("demo", "backward", "demo_backward"),
    ]  # fmt: skip


def test_execution_launcher_that_fails_is_reported_each_time(execution):
    for _ in range(2):
        with pytest.raises(BackendError, match="must run demo_forward, got CUDA error 1"):
            execution.forward(torch.ones(2, 3), WEIGHT, 0.0, "negated", "cuda")
        assert execution.forward(torch.ones(2, 3), WEIGHT, 0.0, "plain", "cuda")[0].numel() == 6


def test_execution_wrapper_left_by_torch_func_is_taken_off(execution):
    left = []
    torch.func.grad(lambda x: (left.append(x) or x).sum())(torch.arange(6.0).view(2, 3))
    execution.forward(torch.ones(2, 3), WEIGHT, 0.0, "plain", "cuda")
    y, _ = execution.forward(left[0], WEIGHT, 0.0, "plain", "cuda")
    assert torch.equal(y, by_hand(torch.arange(6.0).view(2, 3), 0.0)[0])


def test_execution_tensor_without_memory_is_refused(execution):
    execution.forward(torch.ones(2, 3), WEIGHT, 0.0, "plain", "cuda")
    for _ in range(2):
        with pytest.raises(ArgumentError, match="x must be a plain tensor .* without memory"):
            execution.forward(torch._efficientzerotensor((2, 3)), WEIGHT, 0.0, "plain", "cuda")


def test_execution_after_a_fork_loads_again_instead_of_launching(execution, host, monkeypatch):
    arguments = (torch.ones(2, 3), WEIGHT, 0.0, "plain", "cuda")
    execution.forward(*arguments)
    loaded, asked = dict(host._loaded), []
    monkeypatch.setattr(host, "load", lambda device: asked.append(device) or loaded[device])
    cuda_launch._after_fork()
    execution.forward(*arguments)
    host._loaded.update(loaded)
    assert asked == [HERE]


def test_forked_process_forgets_what_was_loaded(host):
    loaded = dict(host._loaded)
    cuda_launch._after_fork()
    assert host._loaded == {}
    host._loaded.update(loaded)


def test_exact_sum_in_a_forked_process_forgets_its_library(monkeypatch):
    monkeypatch.setattr(
        steps_module, "binary_for", lambda *_: SimpleNamespace(function=lambda *_: None)
    )
    kernel_cuda.steps.load(HERE)
    child = os.fork()
    if child == 0:
        os._exit(len(kernel_cuda.steps._loaded))
    kept = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    kernel_cuda.steps._loaded.clear()
    assert kept == 0
