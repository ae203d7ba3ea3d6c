# SPDX-License-Identifier: Apache-2.0
"""What surrounds a call: autocast, threads, captured graphs, copies of modules."""

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rlk.compare import assert_same_bits
from rlk.dispatch import use_backend
from rlk.errors import ArgumentError
from rlk.exact_grad import ExactGradAccumulator
from rlk.operator import FLOATS, Operator
from rlk.torch_suite.sample import (
    OperatorModule,
    Sample,
    assert_same_results,
    module_results,
    sample,
)

THREADS = 4
COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
}


class SurroundingsSuite:
    """One operator among other work of its process."""

    operator: Operator

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_autocast_keeps_dtypes_and_bits(self, device: str, dtype: str) -> None:
        """Inputs are what the caller made them; each narrow dtype is cast to at most."""
        made = sample(self.operator, device, dtype=dtype)
        expected = made.results()
        for narrow in (torch.bfloat16, torch.float16):
            with torch.autocast(device, dtype=narrow):
                found = made.results()
            assert_same_results(found, expected, f"autocast to {narrow}")

    def test_autocast_unlike_dtypes_are_refused_as_without(self, device: str) -> None:
        """Autocast does not repair a call that is wrong without it."""
        made = sample(self.operator, device)
        first, *others = self.operator.inputs
        wrong = {t.name: torch.float16 for t in others if "float16" not in t.dtype}
        for name, dtype in {first.name: torch.float64, **wrong}.items():
            inputs = {**made.batch.inputs, name: made.batch.inputs[name].to(dtype)}
            messages = []
            for enabled in (False, True):
                with torch.autocast(device, dtype=torch.float16, enabled=enabled):
                    with pytest.raises(ArgumentError) as caught:
                        made.call(*inputs.values())
                messages.append(str(caught.value))
            assert messages[0] == messages[1]
            assert messages[0].startswith(f"{self.operator.name}: {name} must be float32")

    def test_threads_together_have_the_bits_of_one(self, device: str) -> None:
        """Forward and backward of unlike batches at the same time."""
        made = [sample(self.operator, device, seed=seed) for seed in range(THREADS)]
        expected = [one.results() for one in made]
        together = threading.Barrier(THREADS)

        def work(one: Sample) -> list[dict[str, torch.Tensor]]:
            together.wait()
            return [one.results() for _ in range(3)]

        with ThreadPoolExecutor(THREADS) as pool:
            for runs, single in zip(pool.map(work, made), expected, strict=True):
                for run in runs:
                    assert_same_results(run, single, "among threads")

    @pytest.mark.parametrize("duplicate", COPIES)
    def test_module_copy_has_the_same_bits_and_its_own_parameters(
        self, device: str, duplicate: str
    ) -> None:
        """Modules that hold the operator's parameters and call it."""
        made = sample(self.operator, device)
        for module in (OperatorModule(made), *self._own_modules(made)):
            # Copied after it ran: what a call leaves in a module is copied with it.
            expected = module_results(module, made)
            module.zero_grad()
            twin = COPIES[duplicate](module)
            before = [p.detach().clone() for p in module.parameters()]
            assert_same_results(module_results(twin, made), expected, duplicate)
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.zero_()
            for parameter, value in zip(module.parameters(), before, strict=True):
                assert_same_bits(parameter, value, "parameter of the original")

    def _own_modules(self, made: Sample) -> list[torch.nn.Module]:
        found = []
        for build in getattr(self, "modules", ()):
            module = build().to(next(iter(made.batch.inputs.values())).device)
            with torch.no_grad():
                for declared, parameter in zip(
                    self.operator.parameters, module.parameters(), strict=True
                ):
                    parameter.copy_(made.batch.inputs[declared.name])
            found.append(module)
        return found

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_second_gpu_has_the_bits_of_the_first_and_leaves_it_current(self, dtype: str) -> None:
        """Forward, backward and sums of an accumulator, of tensors on a GPU that is not current."""
        if torch.cuda.device_count() < 2:
            pytest.skip("needs a second GPU")
        for backend in [b.name for b in self.operator.backends if "nvidia" in b.platforms]:
            with use_backend(backend), torch.cuda.device(0):
                first, second = (self._on(device, dtype) for device in ("cuda:0", "cuda:1"))
            assert_same_results(second, first, f"on the second GPU, {backend}")

    def _on(self, device: str, dtype: str) -> dict[str, torch.Tensor]:
        """Results of a call on this device, while the first is current, and sums of two calls."""
        made = sample(self.operator, device, dtype=dtype)
        module, found = OperatorModule(made), made.results()
        with ExactGradAccumulator(module):
            for _ in range(2):
                module_results(module, made)
        gradients = {n: p.grad for n, p in module.named_parameters()}
        found |= {f"{n} twice": g for n, g in gradients.items() if g is not None}
        assert torch.cuda.current_device() == 0
        assert {t.device for t in found.values()} == {torch.device(device)}
        return {name: tensor.cpu() for name, tensor in found.items()}

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_cuda_graph_replays_forward_and_backward_on_new_inputs(self, dtype: str) -> None:
        """Captured in one graph, replayed on other values, against eager calls on them."""
        made = sample(self.operator, "cuda", dtype=dtype)
        static = made.map(torch.clone)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = static.results()
        for seed in (11, 12):
            other = sample(self.operator, "cuda", dtype=dtype, seed=seed)
            for old, new in _pairs(static, other):
                old.copy_(new)
            for tensor in captured.values():
                tensor.fill_(7)
            graph.replay()
            torch.cuda.synchronize()
            assert_same_results(captured, other.results(), f"replay on seed {seed}")


def _pairs(a: Sample, b: Sample) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tensors = [(*s.batch.inputs.values(), *s.batch.upstream.values()) for s in (a, b)]
    return list(zip(*tensors, strict=True))
