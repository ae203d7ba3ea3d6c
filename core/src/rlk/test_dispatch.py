# SPDX-License-Identifier: Apache-2.0
"""One backend per call: the first that serves unless one is named, and then that one alone."""

import asyncio
import threading

import pytest
import torch

import rlk
from rlk import dispatch
from rlk.errors import BackendError, PlatformError
from rlk.execution import Execution
from rlk.operator import Backend
from rlk.reduce import exact_sum
from rlk.test_support import small_integers, tiny_backend, tiny_operator

CPU = torch.device("cpu")
LOAD_ERRORS = [
    ImportError("no module named engine"),
    OSError("libengine.so: cannot open shared object file"),
    RuntimeError("stale build: ABI 3, expected 4"),
]


class Loader:
    """Loads a backend or raises, and counts how often it was asked."""

    def __init__(self, result):
        self.result = result
        self.calls = 0

    def __call__(self):
        self.calls += 1
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def declare(**results):
    """An operator with one backend of each name, in order, and their loaders."""
    loaders = {name: Loader(result) for name, result in results.items()}
    rows = tuple(Backend(name, load, ("cpu",)) for name, load in loaders.items())
    return tiny_operator("tiny", backends=rows), loaders


@pytest.fixture(autouse=True)
def fresh_choices():
    dispatch.forget_choices()
    yield
    dispatch.forget_choices()


@pytest.fixture
def execution():
    """A runnable operator with backends `first` and `second`."""
    return Execution(declare(first=tiny_backend("first"), second=tiny_backend("second"))[0])


def run(execution, backend=None, *, gradient=False):
    """The backends that a forward call, and on demand its backward, ran on."""
    x, weight = small_integers(2, 3).requires_grad_(), small_integers(3)
    with rlk.trace() as launches:
        y, _ = execution.call(*execution.arguments((x, weight), {"factor": 1.0}, backend))
        if gradient:
            y.sum().backward()
    return [launch.backend for launch in launches]


@pytest.mark.parametrize("error", LOAD_ERRORS, ids=lambda error: type(error).__name__)
def test_choose_auto_load_failure_is_recorded_and_passed_over(error):
    good = tiny_backend("good")
    operator, loaders = declare(broken=error, good=good, later=tiny_backend("later"))
    choice = dispatch.choose(operator, CPU, "auto")
    assert (choice.backend.name, choice.module) == ("good", good)
    assert choice.rejected == (("broken", f"loading failed: {error}"),)
    assert loaders["later"].calls == 0
    assert dispatch.explain(operator, "cpu") == [
        ("broken", f"loading failed: {error}"),
        ("good", "chosen"),
        ("later", "would serve; an earlier row is chosen"),
    ]


@pytest.mark.parametrize("error", LOAD_ERRORS, ids=lambda error: type(error).__name__)
def test_choose_request_load_failure_is_raised_as_it_is(error):
    operator, loaders = declare(good=tiny_backend("good"), broken=error)
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            dispatch.choose(operator, CPU, "broken")
        assert caught.value is error
    assert {name: load.calls for name, load in loaders.items()} == {"good": 0, "broken": 2}


def test_choose_auto_defect_of_a_backend_is_not_passed_over():
    operator, _ = declare(defect=TypeError("forward() takes 2 arguments"), good=tiny_backend())
    with pytest.raises(TypeError, match="takes 2 arguments"):
        dispatch.choose(operator, CPU, "auto")


def test_choose_missing_requirement_is_recorded_or_raised_by_request():
    row = Backend("quantum", Loader(None), ("cpu",), missing=lambda platform: "it needs qubits")
    golden = Backend("golden", Loader(tiny_backend()), ("cpu",))
    operator = tiny_operator("tiny", backends=(row, golden))
    assert dispatch.choose(operator, CPU, "auto").rejected == (("quantum", "it needs qubits"),)
    with pytest.raises(BackendError) as caught:
        dispatch.choose(operator, CPU, "quantum")
    assert str(caught.value) == 'tiny: backend "quantum" cannot run here: it needs qubits'
    assert row.load.calls == 0


def test_choose_unknown_backend_names_all():
    operator, loaders = declare(cuda=tiny_backend(), golden=tiny_backend())
    with pytest.raises(BackendError) as caught:
        dispatch.choose(operator, CPU, "vulkan")
    assert str(caught.value) == (
        "tiny: backend must be one of 'auto', 'cuda', 'golden', got 'vulkan'"
    )
    assert [load.calls for load in loaders.values()] == [0, 0]


def test_choose_backend_of_another_platform_is_refused_by_request():
    elsewhere = Backend("cuda", Loader(tiny_backend()), ("nvidia",))
    here = Backend("golden", Loader(tiny_backend()), ("cpu",))
    operator = tiny_operator("tiny", backends=(elsewhere, here))
    with pytest.raises(BackendError) as caught:
        dispatch.choose(operator, CPU, "cuda")
    assert str(caught.value) == 'tiny: backend "cuda" cannot run here: it does not run on cpu'


@pytest.mark.parametrize("requested", ["auto", "cuda"])
def test_choose_operator_of_gpus_alone_is_refused_elsewhere_in_one_sentence(requested):
    elsewhere = Backend("cuda", Loader(tiny_backend()), ("nvidia",))
    operator = tiny_operator("tiny", backends=(elsewhere,))
    with pytest.raises(PlatformError) as caught:
        dispatch.choose(operator, CPU, requested)
    assert str(caught.value) == (
        "tiny: the device must be an NVIDIA GPU, got cpu; no backend is validated there"
    )
    assert elsewhere.load.calls == 0


def test_choose_auto_all_rejected_lists_every_reason():
    rows = (
        Backend("cuda", Loader(tiny_backend()), ("nvidia",)),
        Backend("quantum", Loader(None), ("cpu",), missing=lambda platform: "it needs qubits"),
        Backend("broken", Loader(OSError("libengine.so")), ("cpu",)),
    )
    with pytest.raises(BackendError) as caught:
        dispatch.choose(tiny_operator("tiny", backends=rows), CPU, "auto")
    assert str(caught.value) == (
        "tiny: no backend can run on cpu (cuda: it serves nvidia unless asked for by name; "
        "quantum: it needs qubits; broken: loading failed: libengine.so)"
    )


def test_choose_second_time_loads_nothing_until_choices_are_forgotten():
    operator, loaders = declare(good=tiny_backend())
    first = dispatch.choose(operator, CPU, "auto")
    assert dispatch.choose(operator, CPU, "auto") is first
    assert loaders["good"].calls == 1
    dispatch.forget_choices()
    dispatch.choose(operator, CPU, "auto")
    assert loaders["good"].calls == 2


def test_choose_operator_declared_anew_gets_its_own_backend():
    old, new = tiny_backend("old"), tiny_backend("new")
    assert dispatch.choose(declare(good=old)[0], CPU, "auto").module is old
    assert dispatch.choose(declare(good=new)[0], CPU, "auto").module is new


def test_use_backend_nested_innermost_holds_and_outer_returns(execution):
    assert run(execution) == ["first"]
    with rlk.use_backend("second"):
        assert run(execution) == ["second"]
        with rlk.use_backend("first"):
            assert run(execution) == ["first"]
        with rlk.use_backend("auto"):
            assert dispatch.requested_backend() == "auto"
            assert run(execution) == ["first"]
        assert run(execution) == ["second"]
    assert run(execution) == ["first"]


def test_use_backend_exception_restores_the_outer_request():
    with rlk.use_backend("second"):
        with pytest.raises(KeyError), rlk.use_backend("first"):
            raise KeyError
        assert dispatch.requested_backend() == "second"
    assert dispatch.requested_backend() == "auto"


def test_use_backend_argument_of_the_call_wins(execution):
    with rlk.use_backend("second"):
        assert run(execution, "first") == ["first"]
        assert run(execution, "auto") == ["first"]


def test_use_backend_unknown_name_fails_at_the_call(execution):
    with rlk.use_backend("vulkan"):
        with pytest.raises(BackendError, match="one of 'auto', 'first', 'second', got 'vulkan'"):
            run(execution)


def test_use_backend_threads_hold_their_own():
    entered = threading.Barrier(3)
    seen = {}

    def work(name):
        with rlk.use_backend(name):
            entered.wait()
            seen[name] = dispatch.requested_backend()
            entered.wait()
        seen[name, "after"] = dispatch.requested_backend()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    entered.wait()
    seen["caller"] = dispatch.requested_backend()
    entered.wait()
    for thread in threads:
        thread.join()
    assert seen == {
        "first": "first", "second": "second", "caller": "auto",
        ("first", "after"): "auto", ("second", "after"): "auto",
    }  # fmt: skip


def test_use_backend_interleaved_tasks_hold_their_own():
    async def work(name, pauses):
        with rlk.use_backend(name):
            for _ in range(pauses):
                await asyncio.sleep(0)
                assert dispatch.requested_backend() == name
        assert dispatch.requested_backend() == "auto"

    async def both():
        # The first to enter is the first to leave.
        await asyncio.gather(work("first", 1), work("second", 3))

    asyncio.run(both())
    assert dispatch.requested_backend() == "auto"
    # What compiled calls of this thread follow.
    assert dispatch._traced.backend == "auto"


def test_backward_after_the_block_runs_on_the_backend_of_forward(execution):
    x = small_integers(2, 3).requires_grad_()
    weight = small_integers(3).requires_grad_()
    with rlk.use_backend("second"):
        y, _ = execution.call(*execution.arguments((x, weight), {"factor": 1.0}, None))
    with rlk.trace() as launches, rlk.use_backend("first"):
        y.sum().backward()
    assert [launch.backend for launch in launches if launch.kernel == "tiny_backward"] == ["second"]


def test_backward_in_another_thread_runs_on_the_backend_of_forward(execution):
    x = small_integers(2, 3).requires_grad_()
    arguments = execution.arguments((x, small_integers(3)), {"factor": 1.0}, "second")
    y, _ = execution.call(*arguments)
    with rlk.trace() as launches:
        thread = threading.Thread(target=lambda: y.sum().backward())
        thread.start()
        thread.join()
    assert [(launch.backend, launch.direction) for launch in launches] == [("second", "backward")]
    assert execution.operator.backend("second").load().threads == [thread]


@pytest.mark.parametrize(("requested", "rounding"), [("golden", "golden"), ("auto", None)])
def test_backward_parameter_gradient_is_rounded_as_requested(monkeypatch, requested, rounding):
    asked = []
    rounded = exact_sum.round
    monkeypatch.setattr(
        exact_sum, "round", lambda *given, backend: asked.append(backend) or rounded(*given)
    )
    execution = Execution(declare(golden=tiny_backend())[0])
    weight = small_integers(3).requires_grad_()
    arguments = execution.arguments((small_integers(2, 3), weight), {"factor": 1.0}, requested)
    with rlk.trace() as launches:
        execution.call(*arguments)[0].sum().backward()
    assert asked == [rounding]
    # The state is added to inside the backend, and rounded for the operator.
    assert [(launch.operator, launch.direction) for launch in launches] == [
        ("tiny", direction) for direction in ("forward", *["backward"] * 3)
    ]


@pytest.mark.parametrize("requested", [None, 0, ["good"], {}], ids=repr)
def test_choose_request_that_is_no_name_is_refused(requested):
    operator, _ = declare(good=tiny_backend("good"))
    with pytest.raises(BackendError) as caught:
        dispatch.choose(operator, CPU, requested)
    assert str(caught.value) == f"tiny: backend must be a name, got {requested!r}"
