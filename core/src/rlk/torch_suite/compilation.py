# SPDX-License-Identifier: Apache-2.0
"""Compiled, exported and faked: the operator is one node, and its bits are those of eager."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlk import trace
from rlk.gates.inputs import default_scalars
from rlk.gates.layout import strided, transposed
from rlk.operator import Operator
from rlk.publish import PUBLISHED
from rlk.torch_suite.sample import (
    OperatorModule,
    Sample,
    assert_same_results,
    module_results,
    sample,
)

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor.contiguous(),
    "strided": strided,
    # Dense: what copies the strides of an input shows here alone.
    "transposed": transposed,
}
# The launch on a GPU that rounds a state.
ROUNDING = "exact_sum.finish"
# Row counts after the first: a power of two, a prime, fewer than before, the least a dynamic
# size may be.
ROWS = (3, 7, 64, 131, 2)


class CompilationSuite:
    """torch.compile, torch.export, fake tensors."""

    operator: Operator

    @pytest.fixture(autouse=True)
    def fresh_compiler(self) -> Any:
        """No graph of another test is found again."""
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_compile_fullgraph_has_the_bits_of_eager(
        self, device: str, layout: str, compiler: str
    ) -> None:
        """Forward and backward; fullgraph: nothing runs eagerly in secret."""
        made = sample(self.operator, device, dtype="bfloat16").map(LAYOUTS[layout])
        compiled = torch.compile(made.call, fullgraph=True, backend=compiler)
        assert_same_results(made.results(compiled), made.results(), compiler)

    @pytest.mark.parametrize(("marked", "graphs"), [(True, 1), (False, 2)])
    def test_compile_other_row_counts_reuse_the_graph(
        self, device: str, marked: bool, graphs: int
    ) -> None:
        """Rows marked dynamic compile once; otherwise the second size makes them dynamic."""
        from torch._dynamo.testing import CompileCounterWithBackend

        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(self._call, fullgraph=True, backend=counter)
        for rows in ROWS:
            made = sample(self.operator, device, leading=(rows, 3), seed=rows)

            def call(*tensors: torch.Tensor) -> Any:
                for declared, tensor in zip(self.operator.inputs, tensors, strict=True):
                    if declared.has_rows and marked:
                        torch._dynamo.mark_dynamic(tensor, 0)
                return compiled(*tensors)

            assert_same_results(made.results(call), made.results(), f"{rows} rows")
        assert counter.frame_count == graphs

    def test_compile_subset_of_gradients_launches_what_eager_launches(self, device: str) -> None:
        """The flags of what is needed arrive in compiled backwards too.

        Whose operator returns states: each is rounded by a launch of its own, as always by golden.
        """
        made = sample(self.operator, device)
        exact = [t.name for t in self.operator.exact_parameters]
        for name in made.differentiable:
            torch._dynamo.reset()
            compiled = torch.compile(made.call, fullgraph=True, backend="aot_eager")
            ran: list[tuple[list[str], dict[str, torch.Tensor]]] = []
            for function in (compiled, made.call):
                with trace() as launches:
                    found = made.results(function, [name])
                ran.append(([launch.kernel for launch in launches], found))
            (launched, _), (eager, _) = ran
            assert launched == eager + [ROUNDING] * (name in exact and device == "cuda")
            assert_same_results(ran[0][1], ran[1][1], f"wanted {name}")

    def _call(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return PUBLISHED[self.operator.name](tensors, default_scalars(self.operator))

    @pytest.mark.parametrize("strict", [False, True])
    def test_export_saved_and_loaded_serves_other_batches(self, device: str, strict: bool) -> None:
        """The operator is one node of the program, which computes other row counts."""
        made = sample(self.operator, device)
        module = OperatorModule(made)
        rows = torch.export.Dim("rows")
        first = [t for t in self.operator.inputs if not t.is_parameter]
        dynamic = [{0: rows} if t.has_rows else None for t in first]
        program = torch.export.export(
            module, tuple(made.row_inputs), dynamic_shapes=(tuple(dynamic),), strict=strict
        )
        targets = [str(node.target) for node in program.graph.nodes]
        assert targets.count(f"rlk.{self.operator.name}.default") == 1
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        for count in (7, 2):
            other = sample(self.operator, device, leading=(count, 5), seed=count)
            module.zero_grad()
            loaded.zero_grad()
            expected = module_results(module, other)
            assert_same_results(module_results(loaded, other), expected, f"{count} rows")

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_fake_tensors_look_like_real_ones_and_launch_nothing(
        self, device: str, layout: str
    ) -> None:
        """Shapes, strides, dtypes and devices of outputs and gradients."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        made = sample(self.operator, device, dtype="bfloat16").map(LAYOUTS[layout])
        expected = _described(made)
        with FakeTensorMode() as mode, trace() as launches:
            assert _described(made.map(mode.from_tensor)) == expected
        assert launches == []


def _described(made: Sample) -> dict[str, tuple[Any, ...]]:
    found = made.results()
    return {n: (t.shape, t.stride(), t.dtype, t.device) for n, t in found.items()}
