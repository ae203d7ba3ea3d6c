# SPDX-License-Identifier: Apache-2.0
"""What pytest needs for operators: the interpreter where there is no GPU, and a suite to inherit.

from rlk.pytest_plugin import OperatorSuite

class TestDemo(OperatorSuite):
    operator = OPERATOR
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rlk import interpreter
from rlk.gates import Case, cases, judge
from rlk.gates.inputs import fixture, smallest_sizes
from rlk.gates.layout import strided
from rlk.operator import Operator

pytest.register_assert_rewrite(f"{__package__}.torch_suite")
# Below: a module is rewritten when it is imported.
from rlk.torch_suite import (  # noqa: E402
    CompilationSuite,
    DistributionSuite,
    ExactSumSuite,
    GradientSuite,
    SurroundingsSuite,
)
from rlk.torch_suite.gradients import CONCERNS  # noqa: E402
from rlk.torch_suite.ranks import RANKS, Ranks  # noqa: E402

# Few rows: registration does not depend on how many there are.
ROWS = 3


class OperatorSuite(
    CompilationSuite, GradientSuite, SurroundingsSuite, DistributionSuite, ExactSumSuite
):
    """Every short gate of `operator`, its registration with torch, and the features of torch.

    Subclass it in a package's tests and name the declaration. A gate that this machine cannot
    judge is skipped with the reason; everything else passes or fails.
    """

    operator: Operator
    # What builds a module that calls the operator on its inputs in order, without parameters;
    # must survive pickle: `functools.partial(Module, 128)` at the operator's smallest width.
    modules: tuple[Callable[[], torch.nn.Module], ...] = ()
    # None: every declared backend. Name some where another command judges the rest.
    backends: tuple[str, ...] | None = None

    def test_gate_every_record_passes(self, gate_case: Case) -> None:
        """All records of one short case."""
        records = judge(gate_case)
        failed = [f"{r.tensor} {r.config}: {r.reason}" for r in records if r.status == "failed"]
        if failed:
            pytest.fail("\n".join([*failed[:5], gate_case.repro]))
        if all(r.status == "not_run" for r in records):
            pytest.skip(records[0].reason or "")

    def test_declaration_every_number_is_judged_beside_its_default(self) -> None:
        """A kernel that ignores a number would pass gates that only use its default."""
        numbers = [s for s in self.operator.free_scalars if not s.choices]
        alone = [s.name for s in numbers if not set(s.also) - {s.default}]
        if alone:
            pytest.fail(f"{self.operator.name}: also must name a value for {', '.join(alone)}")

    @pytest.mark.parametrize("layout", ["contiguous", "strided"])
    def test_registration_opcheck_passes(self, device: str, layout: str) -> None:
        """Schema, fake kernels and autograd of both operators, as torch checks them."""
        for dtype in self.operator.inputs[0].dtype:
            forward, backward = registration_samples(self.operator, dtype, layout, device)
            torch.library.opcheck(_op(self.operator.name), forward)
            torch.library.opcheck(_op(f"{self.operator.name}_backward"), backward)


def registration_samples(
    operator: Operator, dtype: str, layout: str, device: str
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of the forward and the backward operator of torch, in schema order."""
    batch = fixture(operator, dtype, rows=ROWS, sizes=smallest_sizes(operator), seed=1)
    arrange = strided if layout == "strided" else torch.Tensor.contiguous
    tensors = [
        arrange(batch.inputs[t.name].to(device)).requires_grad_(t.gradient is not None)
        for t in operator.inputs
    ]
    scalars = list(batch.scalars.values())
    forward = (*tensors, *scalars, "auto")
    with torch.no_grad():
        results = _op(operator.name)(*forward)
    results = results if isinstance(results, tuple) else (results,)
    saved = results[len(operator.outputs) :]
    upstream = [arrange(batch.upstream[t.name].to(device)) for t in operator.outputs]
    needs = [True for _ in operator.returned_gradients]
    kept = operator.kept(tensors, results[: len(operator.outputs)])
    inputs = [tensor.detach() for tensor in kept]
    return forward, (*upstream, *inputs, *saved, *scalars, *needs, "auto")


def pytest_configure(config: pytest.Config) -> None:
    """Run Triton kernels in the interpreter where there is no GPU."""
    interpreter.enable_without_gpu()


@pytest.fixture(scope="session")
def rank_processes() -> Iterator[dict[str, Ranks]]:
    """The processes of distributed tests, by device; each starts when a test first needs it."""
    pools = {device: Ranks(device) for device in ("cpu", "cuda")}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def ranks(device: str, rank_processes: dict[str, Ranks]) -> Ranks:
    """Two processes with one process group on this kind of device."""
    if device == "cuda" and torch.cuda.device_count() < RANKS:
        pytest.skip("needs a second GPU")
    return rank_processes[device]


def pytest_pycollect_makeitem(collector: Any, name: str, obj: Any) -> list[Any] | None:
    """No item of a test that does not concern a suite's operator: it would have nothing to say."""
    suite = getattr(collector, "cls", None)
    which = getattr(obj, CONCERNS, None)
    if which is None or suite is None or not issubclass(suite, OperatorSuite):
        return None
    return None if which(suite.operator) else []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Devices of a suite's tests, and one test per short case of its operator."""
    suite = metafunc.cls is not None and issubclass(metafunc.cls, OperatorSuite)
    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
    marks = [pytest.mark.gpu, missing]
    if suite and "device" in metafunc.fixturenames:
        if "ranks" in metafunc.fixturenames and metafunc.config.pluginmanager.hasplugin("xdist"):
            # One worker: two processes on each GPU would wait for memory, and start twice.
            marks.append(pytest.mark.xdist_group("ranks"))
        cpu = ["cpu"] if _serves_cpu(metafunc.cls.operator) else []
        metafunc.parametrize("device", [*cpu, pytest.param("cuda", marks=marks)])
    if "gate_case" in metafunc.fixturenames and metafunc.cls is not None:
        wanted = metafunc.cls.backends
        found = [
            case
            for case in cases([metafunc.cls.operator])
            if wanted is None or case.backend in wanted
        ]
        metafunc.parametrize("gate_case", found, ids=[case.identity for case in found])


def _op(name: str) -> Any:
    return getattr(torch.ops.rlk, name).default


def _serves_cpu(operator: Operator) -> bool:
    """Whether calls on the CPU are served without being asked for by a backend's name."""
    return any("cpu" in backend.platforms for backend in operator.backends)
