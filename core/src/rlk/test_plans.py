# SPDX-License-Identifier: Apache-2.0
"""A plan serves the calls that look like the one it was made for, and no other."""

import threading
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rlk
from rlk import dispatch, plans
from rlk.compare import assert_same_bits
from rlk.errors import ArgumentError, BackendError, GradientError
from rlk.execution import Execution
from rlk.operator import Backend
from rlk.publish import publish
from rlk.rows import as_rows
from rlk.test_support import small_integers, tiny_backend, tiny_operator


def planning_backend(label):
    """A backend that plans, as the CUDA one does; `made` lists the shapes of its plans."""
    module = tiny_backend(label)
    declared = tiny_operator("tiny")
    module.made = []

    def plan_forward(rows, shapes, call):
        module.made.append([tuple(shape) for shape in shapes])

        def plan(tensors, scalars):
            flat = as_rows(declared, declared.inputs, tensors)
            results = module.forward(*flat, factor=scalars[0])
            return tuple(r.reshape(s) for r, s in zip(results, shapes, strict=True))

        return plan

    def plan_backward(rows, shapes, call):
        module.made.append([None if shape is None else tuple(shape) for shape in shapes])
        names = [t.name for t in declared.differentiable]
        needs = frozenset(n for n, shape in zip(names, shapes, strict=True) if shape is not None)

        def plan(tensors, scalars):
            read = declared.outputs + declared.inputs + declared.saved
            results = module.backward(
                *as_rows(declared, read, tensors), needs=needs, factor=scalars[0]
            )
            return tuple(
                None if s is None else r.reshape(s) for r, s in zip(results, shapes, strict=True)
            )

        return plan

    module.plan_forward, module.plan_backward = plan_forward, plan_backward
    return module


first, second = planning_backend("first"), planning_backend("second")
ROWS = (Backend("first", lambda: first, ("cpu",)), Backend("second", lambda: second, ("cpu",)))
published = publish(tiny_operator("tiny_plans", backends=ROWS))


def inputs(*shape, dtype=torch.float32):
    return small_integers(*shape, dtype=dtype), small_integers(shape[-1], seed=1)


def formula(x, weight, factor=1.0):
    """y in FP64, exact for small integers."""
    x = x.detach().double()
    y = x * x.abs().amax(-1, keepdim=True) * weight.detach().double()
    return y * factor


def call(x, weight, factor=1.0, backend=None):
    return published((x, weight), {"factor": factor}, backend)[0]


def negated(x):
    return torch.complex(torch.zeros_like(x), -x).conj().imag


BASE = inputs(6, 4)
CHANGES = {
    "rows": lambda x, w: (x[:3].clone(), w),
    "columns": lambda x, w: (x[:, :3].clone(), w[:3].clone()),
    "rank": lambda x, w: (x.view(2, 3, 4), w),
    "strides": lambda x, w: (x.t().contiguous().t(), w),
    "expanded": lambda x, w: (x[:1].expand(6, 4), w),
    "strides of the weight": lambda x, w: (x, torch.stack([w, w], 1)[:, 0]),
    "dtype": lambda x, w: (x.bfloat16(), w),
    "dtype of the weight": lambda x, w: (x.half(), w.half()),
    "negated view": lambda x, w: (negated(x), w),
    "gradient": lambda x, w: (x.clone().requires_grad_(), w),
    "gradient of the weight": lambda x, w: (x, w.clone().requires_grad_()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_call_that_looks_different_is_served_by_its_own_plan(change):
    changed = CHANGES[change](*BASE)
    assert plans.looks(changed, ()) != plans.looks(BASE, ())
    for tensors in (BASE, changed, BASE, changed):
        y = call(*tensors)
        assert_same_bits(y.detach(), formula(*tensors).to(tensors[0].dtype), change)
        assert y.requires_grad == any(t.requires_grad for t in tensors)


@pytest.mark.parametrize("change", ["meta", "sparse"])
def test_looks_of_another_kind_of_tensor_with_equal_sizes_and_strides_differ(change):
    x = torch.zeros(()).expand(6, 4)
    other = x.to("meta") if change == "meta" else torch.zeros(6, 4).to_sparse()
    if change == "sparse":
        assert other.stride() == x.stride()
    assert plans.looks((x,), ()) != plans.looks((other,), ())


def test_call_that_looks_alike_is_not_planned_again():
    x, weight = inputs(5, 4)
    call(x, weight)
    first.made.clear()
    assert_same_bits(call(x * 2, weight + 1), formula(x * 2, weight + 1).float())
    assert first.made == []


REFUSED = {
    "a weight of another length": lambda x, w: (x, w[:3]),
    "a weight of another dtype": lambda x, w: (x, w.double()),
    "a sparse tensor": lambda x, w: (x.to_sparse(), w),
    "a compressed tensor": lambda x, w: (x.to_sparse_csr(), w),
    "a nested tensor": lambda x, w: (torch.nested.nested_tensor([x, x]), w),
    "no tensor": lambda x, w: (x.tolist(), w),
}


@pytest.mark.filterwarnings("ignore:.*(beta|prototype)")
@pytest.mark.parametrize("change", REFUSED)
def test_call_that_must_be_refused_is_refused_after_a_good_one_and_each_time(change):
    for _ in range(2):
        assert_same_bits(call(*BASE), formula(*BASE).float())
        with pytest.raises(ArgumentError, match="tiny_plans: (x|weight) must be"):
            call(*REFUSED[change](*BASE))


def test_call_scalar_follows_its_value_and_is_checked_each_time():
    seen = []
    forward = first.forward

    def spy(x, weight, *, factor):
        seen.append(str(factor))
        return forward(x, weight, factor=factor)

    first.forward = spy
    try:
        for factor in (1.0, 0.5, 0.0, -0.0, 2):
            assert_same_bits(call(*BASE, factor), formula(*BASE, factor).float())
    finally:
        first.forward = forward
    assert seen == ["1.0", "0.5", "0.0", "-0.0", "2.0"]
    for factor in (True, -1.0, float("nan"), "1.0"):
        with pytest.raises(ArgumentError, match="tiny_plans: factor must be"):
            call(*BASE, factor)


def test_backward_needs_of_each_call_are_its_own():
    for needs in [*product((True, False), repeat=2)] * 2:
        x, weight = (t.clone().requires_grad_(n) for t, n in zip(BASE, needs, strict=True))
        y = call(x, weight)
        assert y.requires_grad == any(needs)
        if not any(needs):
            continue
        y.sum().backward()
        assert [t.grad is not None for t in (x, weight)] == list(needs)
        peak = BASE[0].abs().amax(1, keepdim=True)
        if needs[0]:
            assert_same_bits(x.grad, peak * BASE[1])
        if needs[1]:
            assert_same_bits(weight.grad, (peak * BASE[0]).sum(0))


def test_backward_upstream_of_another_layout_is_served_by_its_own_plan():
    x, weight = (t.clone().requires_grad_() for t in BASE)
    y = call(x, weight)
    peak = BASE[0].abs().amax(1, keepdim=True)
    plain = small_integers(6, 4, seed=2)
    for dy in (plain, plain.t().contiguous().t(), plain[:1].expand(6, 4), negated(plain)):
        (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        assert_same_bits(dx, dy.resolve_neg() * peak * BASE[1])


def test_backward_saved_tensor_replaced_by_hooks_is_seen():
    def unpack(tensor):
        return tensor.to(torch.float64) if tensor.shape == (4,) else tensor

    x, weight = (t.clone().requires_grad_() for t in BASE)
    call(x, weight).sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        y = call(x, weight)
    with pytest.raises(ArgumentError, match="weight must be float32"):
        y.sum().backward()


def ran(backend=None):
    with rlk.trace() as launches:
        call(*BASE, backend=backend)
    return [launch.backend for launch in launches]


def test_call_backend_request_is_followed_at_every_call():
    for _ in range(2):
        assert ran() == ["first"]
        with rlk.use_backend("second"):
            assert ran() == ["second"]
            assert ran("first") == ["first"]
        with pytest.raises(BackendError, match="backend must be one of 'auto', 'first', 'second'"):
            ran("third")


def test_call_after_choices_are_forgotten_is_chosen_afresh():
    loaded = [planning_backend("old"), planning_backend("new")]
    row = Backend("any", lambda: loaded.pop(0), ("cpu",))
    execution = Execution(tiny_operator("tiny", backends=(row,)))
    arguments = (*BASE, 1.0, "auto")
    found = []
    for forget in (False, False, True, False):
        if forget:
            dispatch.forget_choices()
        with rlk.trace() as launches:
            execution.call(*arguments)
        found += [launch.backend for launch in launches]
    dispatch.forget_choices()
    assert found == ["old", "old", "new", "new"]


def test_call_whose_first_attempt_failed_is_planned_again():
    attempts = []

    def load():
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("no such file")
        return planning_backend("late")

    dispatch.forget_choices()
    execution = Execution(tiny_operator("tiny", backends=(Backend("late", load, ("cpu",)),)))
    with pytest.raises(OSError, match="no such file"):
        execution.call(*BASE, 1.0, "late")
    assert_same_bits(execution.call(*BASE, 1.0, "late")[0], formula(*BASE).float())
    dispatch.forget_choices()


def test_plans_are_bounded_in_number(monkeypatch):
    monkeypatch.setattr(plans, "MOST_PLANS", 4)
    execution = Execution(tiny_operator("tiny", backends=ROWS))
    for rows in (1, 2, 3, 4, 5, 6, 1, 5):
        x, weight = inputs(rows, 4)
        assert_same_bits(execution.forward(x, weight, 1.0, "first")[0], formula(x, weight).float())
        assert len(execution._forwards._plans) <= 4


def test_call_under_a_mode_or_transform_goes_around_its_plan():
    class Names(TorchDispatchMode):
        names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    call(*BASE)
    with Names() as mode:
        assert_same_bits(call(*BASE), formula(*BASE).float())
    assert mode.names[0] == "rlk.tiny_plans.default"
    with pytest.raises(GradientError, match="got torch.func"):
        torch.func.grad(lambda x: call(x, BASE[1]).sum())(BASE[0])
    with pytest.raises(ArgumentError, match="got torch.vmap"):
        torch.vmap(lambda x: call(x, BASE[1]))(BASE[0].view(2, 3, 4))
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert_same_bits(compiled(*BASE), formula(*BASE).float())
    with torch.inference_mode():
        assert_same_bits(call(*BASE), formula(*BASE).float())


def test_call_grad_mode_of_each_call_is_its_own():
    x, weight = (t.clone().requires_grad_() for t in BASE)
    for enabled in (True, False, True):
        with torch.set_grad_enabled(enabled):
            assert call(x, weight).requires_grad == enabled


def test_call_subclass_that_looks_alike_goes_through_the_dispatcher():
    class Named(torch.Tensor):
        pass

    call(*BASE)
    y = call(BASE[0].as_subclass(Named), BASE[1])
    assert_same_bits(torch.Tensor(y), formula(*BASE).float())


def test_call_from_many_threads_gives_each_its_own_bits():
    wrong, start = [], threading.Barrier(4)

    def work(seed):
        start.wait()
        for step in range(40):
            rows, dtype = 1 + (seed + step) % 7, (torch.float32, torch.half)[step % 2]
            x, weight = inputs(rows, 4, dtype=dtype)
            x = x.requires_grad_(step % 3 == 0)
            if not torch.equal(call(x, weight).detach(), formula(x, weight).to(dtype)):
                wrong.append((seed, step))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
