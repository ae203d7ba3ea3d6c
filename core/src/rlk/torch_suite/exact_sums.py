# SPDX-License-Identifier: Apache-2.0
"""Parameter gradients kept as exact states over calls, and rounded once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rlk.carried import CALLS
from rlk.compare import assert_same_bits, same_bits
from rlk.exact_grad import ExactGradAccumulator, new_carrier, state_of
from rlk.gates.inputs import VALUES
from rlk.operator import Operator
from rlk.publish import PUBLISHED
from rlk.reduce import exact_sum
from rlk.torch_suite.gradients import concerns
from rlk.torch_suite.sample import OperatorModule, Sample, module_results, sample

# Whole steps of a chain over rows but at the end, in every dtype.
CHAIN_ROWS, STEPS = 80, ((0, 32), (32, 64), (64, 80))
# Uneven pieces of the first leading axis.
ROWS, PIECES = 6, ((0, 1), (1, 4), (4, 6))

WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda call: call,
    "aot_eager": lambda call: torch.compile(call, fullgraph=True, backend="aot_eager"),
    "inductor": lambda call: torch.compile(call, fullgraph=True, backend="inductor"),
    "checkpoint": lambda call: lambda *t: checkpoint(call, *t, use_reentrant=False),
    "reentrant": lambda call: lambda *t: checkpoint(call, *t, use_reentrant=True),
}


def has_chains(operator: Operator) -> bool:
    """Whether a gradient is a chain over rows."""
    return bool(operator.chain_parameters)


def has_exact_parameters(operator: Operator) -> bool:
    """Whether there is anything to carry."""
    return bool(operator.exact_parameters)


class ExactSumSuite:
    """One operator, called with carriers and inside accumulators."""

    operator: Operator

    @concerns(has_exact_parameters)
    @pytest.mark.parametrize(
        ("way", "dtype"), [("eager", "bfloat16"), *((way, "float32") for way in WAYS)]
    )
    def test_carried_calls_on_pieces_round_to_the_gradient_of_the_whole(
        self, device: str, way: str, dtype: str
    ) -> None:
        """Eager, compiled and recomputed; parameters get zeros, rows what they always get."""
        torch._dynamo.reset()
        made = self._sample(device, dtype)
        names = [t.name for t in self.operator.exact_parameters]
        call = WAYS[way](self._carried_call)
        leaves: dict[str, Any] = made.leaves()
        carriers = [new_carrier(leaves[name]) for name in names]
        pieces: list[dict[str, Any]] = []
        for place in PIECES:
            piece = made.rows(*place)
            # Rows are leaves of each piece, parameters of all.
            given = piece.leaves() | {t.name: leaves[t.name] for t in self.operator.parameters}
            outputs = call(*given.values(), *carriers)
            torch.autograd.backward(outputs, list(piece.batch.upstream.values()))
            pieces.append(given)
        expected = made.results()
        for name, carrier in zip(names, carriers, strict=True):
            found = exact_sum.round(state_of(carrier), leaves[name].dtype)
            assert_same_bits(found.view_as(leaves[name]), expected[f"d{name}"], f"d{name} {way}")
            assert_same_bits(leaves[name].grad, torch.zeros_like(leaves[name]), f"{name}.grad")
        for declared in self.operator.inputs:
            if declared.gradient == "row":
                gradient = torch.cat([piece[declared.name].grad for piece in pieces])
                assert_same_bits(gradient, expected[f"d{declared.name}"], f"d{declared.name}")

    @concerns(has_exact_parameters)
    def test_carrier_gradient_of_a_call_has_digits_that_add_in_float64(self, device: str) -> None:
        """Whole numbers in [0, 2^32), on every backend that runs here."""
        made = self._sample(device, "float32")
        leaves = made.leaves()
        carriers = [new_carrier(leaves[t.name]) for t in self.operator.exact_parameters]
        outputs = self._carried_call(*leaves.values(), *carriers)
        torch.autograd.backward(outputs, list(made.batch.upstream.values()))
        for carrier in carriers:
            assert carrier.grad is not None
            digits = carrier.grad[:9]
            assert ((digits >= 0) & (digits < 2**32) & (digits == digits.floor())).all()
            assert (digits != 0).any()

    @concerns(has_exact_parameters)
    def test_registration_carried_opcheck_passes(self, device: str) -> None:
        """Schema, fake kernel and autograd of the operator that takes carriers."""
        made = self._sample(device, "float32")
        leaves = made.leaves()
        op = getattr(torch.ops.rlk, f"{self.operator.name}_carried").default
        scalars = list(made.batch.scalars.values())
        sums = [new_carrier(leaves[t.name]) for t in self.operator.exact_parameters]
        chains = [leaf for t in self.operator.chain_parameters for leaf in _chain(leaves[t.name])]
        for given in ([*sums, *chains], [None] * len(self.operator.carriers)):
            torch.library.opcheck(op, (*leaves.values(), *given, *scalars, "auto"))

    @concerns(has_chains)
    @pytest.mark.parametrize(
        ("way", "dtype"),
        [("eager", "float32"), *((way, "bfloat16") for way in ("eager", "inductor", "checkpoint"))],
    )
    def test_continued_chain_of_whole_steps_has_the_bits_of_one_call(
        self, device: str, way: str, dtype: str
    ) -> None:
        """Eager, compiled and recomputed; what the calls were is told beside it."""
        torch._dynamo.reset()
        made = sample(self.operator, device, leading=(CHAIN_ROWS,), dtype=dtype)
        (declared,) = self.operator.chain_parameters
        call, leaves = WAYS[way](self._carried_call), made.leaves()
        leaf, calls = _chain(leaves[declared.name])
        carriers = [*[None] * len(self.operator.exact_parameters), leaf, calls]
        for place in STEPS:
            piece = made.rows(*place)
            given = piece.leaves() | {t.name: leaves[t.name] for t in self.operator.parameters}
            outputs = call(*given.values(), *carriers)
            torch.autograd.backward(outputs, list(piece.batch.upstream.values()))
            assert leaf.grad is not None
            leaf.data.copy_(leaf.grad)
            leaf.grad = None
        expected = made.results()[f"d{declared.name}"]
        assert (expected != 0).any()
        assert_same_bits(leaf.detach().to(expected.dtype), expected, f"d{declared.name} {way}")
        assert calls.grad is not None
        ragged = 16 if dtype == "float32" else 0
        assert calls.grad.tolist() == [CHAIN_ROWS, len(STEPS), ragged]

    @concerns(has_chains)
    def test_accumulator_continues_chains_over_micro_batches(self, device: str) -> None:
        """Exact sums beside them; one parameter of each kind in one block."""
        made = sample(self.operator, device, leading=(CHAIN_ROWS,), dtype="bfloat16")
        module = OperatorModule(made)
        with ExactGradAccumulator(module, continue_chains=True) as sums:
            for place in STEPS:
                module_results(module, made.rows(*place))
        assert sums.report().chain == tuple(t.name for t in self.operator.chain_parameters)
        expected = made.results()
        for name, gradient in _gradients(module).items():
            assert_same_bits(gradient, expected[f"d{name}"], f"d{name}")

    @concerns(has_chains)
    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
    def test_cuda_graph_continues_chains_from_replay_to_replay(self) -> None:
        """One graph of forward and backward, replayed on both halves of a batch, in two blocks."""
        made = sample(self.operator, "cuda", leading=(64,), dtype="bfloat16")
        halves = [made.rows(0, 32), made.rows(32, 64)]
        module, static = OperatorModule(made), halves[0].map(torch.clone)
        rows, upstream = static.row_inputs, list(static.batch.upstream.values())
        accumulator = ExactGradAccumulator(module, continue_chains=True)
        graph = torch.cuda.CUDAGraph()
        with accumulator:
            # Warm: it reads carriers that the block has just cleared, and the block what it adds.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.autograd.backward(module(*rows), upstream)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                torch.autograd.backward(module(*rows), upstream)
        expected = made.results()
        for _ in range(2):
            module.zero_grad(set_to_none=False)
            with accumulator:
                for half in halves:
                    new = (*half.row_inputs, *half.batch.upstream.values())
                    for old, value in zip((*rows, *upstream), new, strict=True):
                        old.copy_(value)
                    graph.replay()
            for name, gradient in _gradients(module).items():
                assert_same_bits(gradient, expected[f"d{name}"], f"d{name} of replays")

    @concerns(has_exact_parameters)
    @pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
    def test_accumulator_on_two_ranks_has_the_bits_of_one_call(self, ranks: Any, wrap: str) -> None:
        """Uneven micro-batches on each rank, in a module of ours and a bare one."""
        self._run(ranks, "accumulate_exactly", wrap, tuple(getattr(self, "modules", ())))  # type: ignore[attr-defined]

    @concerns(has_exact_parameters)
    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
    def test_cuda_graph_in_accumulators_replays_into_their_sums(self) -> None:
        """One graph of forward and backward, replayed in two blocks, each over two batches."""
        made = [sample(self.operator, "cuda", seed=seed) for seed in range(4)]
        module, static = OperatorModule(made[0]), made[0].map(torch.clone)
        rows = [static.batch.inputs[n] for n in _row_names(self.operator)]
        upstream = list(static.batch.upstream.values())
        accumulator = ExactGradAccumulator(module)
        graph = torch.cuda.CUDAGraph()
        with accumulator:
            # Warm, for plans, builds and .grad; off the default stream, as autograd runs a
            # gradient's addition on the stream that first asked for it. It reads carriers that
            # the block has just cleared, and the block reads what it adds.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.autograd.backward(module(*rows), upstream)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                torch.autograd.backward(module(*rows), upstream)
        for pair in (made[:2], made[2:]):
            module.zero_grad(set_to_none=False)
            with accumulator:
                for batch in pair:
                    given = [batch.batch.inputs[n] for n in _row_names(self.operator)]
                    new = (*given, *batch.batch.upstream.values())
                    for old, value in zip((*rows, *upstream), new, strict=True):
                        old.copy_(value)
                    graph.replay()
            eager = OperatorModule(made[0])
            with ExactGradAccumulator(eager):
                for batch in pair:
                    module_results(eager, batch)
            for declared in self.operator.exact_parameters:
                found, expected = (getattr(m, declared.name).grad for m in (module, eager))
                assert_same_bits(found, expected, f"d{declared.name} of a replay")
                assert (expected != 0).any()

    def _sample(self, device: str, dtype: str) -> Sample:
        made = sample(
            self.operator, device, leading=(ROWS, 3), dtype=dtype, values=VALUES["cancelling"]
        )
        pieces = [made.rows(*piece).results() for piece in PIECES]
        for declared in self.operator.exact_parameters:
            name = f"d{declared.name}"
            rounded = sum(piece[name] for piece in pieces)
            assert isinstance(rounded, torch.Tensor)
            # Otherwise a state that was rounded on the way would pass.
            assert not same_bits(rounded, made.results()[name])
        return made

    def _carried_call(self, *tensors: Any) -> tuple[torch.Tensor, ...]:
        published, count = PUBLISHED[self.operator.name], len(self.operator.inputs)
        scalars = {s.name: s.default for s in self.operator.scalars}
        return published(tensors[:count], scalars, None, tensors[count:])


def _chain(parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The carriers of a chain that begins."""
    leaf = torch.zeros_like(parameter, dtype=torch.float32).requires_grad_()
    calls = torch.zeros(CALLS, dtype=torch.float64, device=parameter.device)
    return leaf, calls.requires_grad_()


def _gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of every parameter, each of which has one."""
    found = {name: p.grad for name, p in module.named_parameters()}
    assert None not in found.values()
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def _row_names(operator: Operator) -> list[str]:
    return [t.name for t in operator.inputs if not t.is_parameter]
