# SPDX-License-Identifier: Apache-2.0
"""Gradients: those that are needed, of first order, and refused where they would be wrong."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from rlk import trace
from rlk.compare import assert_same_bits
from rlk.dispatch import choose
from rlk.errors import ArgumentError, GradientError
from rlk.execution import Execution
from rlk.gates.layout import strided
from rlk.operator import Backend, Operator
from rlk.torch_suite.sample import Sample, assert_same_results, sample

# The attribute of a test that says which operators it is for.
CONCERNS = "concerns"

Test = TypeVar("Test", bound=Callable[..., None])


def concerns(which: Callable[[Operator], bool]) -> Callable[[Test], Test]:
    """Mark a test that exists for operators of one kind alone.

    Args:
        which: whether an operator is of that kind.
    Returns:
        A decorator; `rlk.pytest_plugin` does not collect the test for other operators.
    """

    def mark(test: Test) -> Test:
        setattr(test, CONCERNS, which)
        return test

    return mark


class GradientSuite:
    """Autograd of one operator."""

    operator: Operator

    def test_needed_gradients_alone_reach_the_backend(self, device: str) -> None:
        """Every subset: the flags that arrive, what the backend leaves out, and the bits."""
        made = sample(self.operator, device)
        expected = made.results()
        asked: list[tuple[frozenset[str], set[str]]] = []

        def backward(*arguments: Any, needs: frozenset[str], **scalars: Any) -> Any:
            results = module.backward(*arguments, needs=needs, **scalars)
            made_for = zip(self.operator.returned_gradients, results, strict=True)
            asked.append((needs, {t.name for t, r in made_for if r is not None}))
            return results

        module = choose(self.operator, torch.device(device), "auto").module
        spy = SimpleNamespace(forward=module.forward, backward=backward)
        row = Backend("spy", lambda: spy, ("cpu", "nvidia"))  # type: ignore[arg-type,return-value]
        execution = Execution(replace(self.operator, backends=(row,)))
        outputs = len(self.operator.outputs)

        def call(*tensors: torch.Tensor) -> Any:
            given = execution.arguments(tensors, made.batch.scalars, "spy")
            return execution.call(*given)[:outputs]

        for wanted in _subsets(made.differentiable):
            asked.clear()
            found = made.results(call, wanted)
            needed = _needed(self.operator, wanted)
            assert asked == [(frozenset(needed), set(needed))]
            assert_same_results(found, {n: expected[n] for n in found}, f"wanted {wanted}")

    def test_gradients_not_needed_have_no_memory(self, device: str) -> None:
        """The backward operator of torch returns size 0 for them, and fake ones agree."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        made = sample(self.operator, device)
        for wanted in _subsets(made.differentiable):
            sizes = [t.numel() for t in _backward(made, wanted)]
            kept = list(self.operator.needed(wanted))
            assert [size > 0 for size in sizes] == kept
            with FakeTensorMode() as mode:
                faked = _backward(made.map(mode.from_tensor), wanted)
            assert [t.numel() for t in faked] == sizes

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_call_without_gradients_has_the_same_bits(self, device: str, mode: Any) -> None:
        """Nothing is kept for a backward, and none is launched."""
        made = sample(self.operator, device)
        expected = made.results()
        leaves = made.leaves().values()
        with mode(), trace() as launches:
            outputs = made.call(*leaves)
            # Tensors that are born without a version counter, as a server's are.
            again = made.call(*(leaf * 1 for leaf in leaves))
        assert {launch.direction for launch in launches} == {"forward"}
        for declared, output in zip(self.operator.outputs * 2, outputs + again, strict=True):
            assert (output.grad_fn, output.requires_grad) == (None, False)
            assert output.is_inference() == (mode is torch.inference_mode)
            assert_same_bits(output, expected[declared.name], declared.name)

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpoint_recomputes_and_has_the_same_bits(
        self, device: str, reentrant: bool
    ) -> None:
        """Activation checkpointing in both of its modes."""
        from torch.utils.checkpoint import checkpoint

        made, expected = sample(self.operator, device), sample(self.operator, device).results()
        ran: list[bool] = []

        def call(*tensors: torch.Tensor) -> Any:
            ran.append(torch.is_grad_enabled())
            return made.call(*tensors)

        leaves = made.leaves()
        outputs = checkpoint(call, *leaves.values(), use_reentrant=reentrant)
        torch.autograd.backward(outputs, list(made.batch.upstream.values()))
        assert ran == [not reentrant, True]
        found = {t.name: o for t, o in zip(self.operator.outputs, outputs, strict=True)}
        found |= {f"d{name}": leaves[name].grad for name in made.differentiable}
        assert_same_results(found, expected, f"reentrant={reentrant}")

    def test_create_graph_first_order_use_has_the_same_bits(self, device: str) -> None:
        """A logged gradient norm or a detached penalty needs no second derivative."""
        made = sample(self.operator, device)
        leaves, gradients = _first_gradients(made)
        expected = made.results()
        for name, gradient in zip(made.differentiable, gradients, strict=True):
            assert_same_bits(gradient, expected[f"d{name}"], name)
        leaf = leaves[made.differentiable[0]]
        penalty = sum(g.detach().float().square().sum() for g in gradients)
        (penalty * leaf.sum()).backward()
        assert leaf.grad is not None
        assert_same_bits(leaf.grad, (penalty * torch.ones_like(leaf)), "gradient of the penalty")

    @concerns(lambda operator: not operator.linear)
    def test_second_differentiation_is_refused_for_every_pair(self, device: str) -> None:
        """It would be silently wrong: autograd would take the gradient for a constant."""
        leaves, gradients = _first_gradients(sample(self.operator, device))
        wanted = (
            f"{self.operator.name}: the derivative must be of first order, got a second "
            "differentiation; detach the first gradient"
        )
        for gradient in gradients:
            for leaf in leaves.values():
                with pytest.raises(GradientError) as caught:
                    torch.autograd.grad(gradient.sum(), leaf, retain_graph=True)
                assert str(caught.value) == wanted

    @concerns(lambda operator: operator.linear)
    @pytest.mark.parametrize("layout", ["contiguous", "strided"])
    def test_second_and_third_derivative_of_a_linear_operator_are_its_own(
        self, device: str, layout: str
    ) -> None:
        """The derivative of backward is forward: calls on other values have these bits."""
        arrange = strided if layout == "strided" else torch.Tensor.contiguous
        made = sample(self.operator, device)
        first, gradients = _first_gradients(made.map(arrange))
        upstream = [first[f"d{t.name}"] for t in self.operator.outputs]
        names = self.operator.differentiable
        other = sample(self.operator, device, seed=5)
        given = [arrange(other.batch.inputs[t.name]).requires_grad_() for t in names]
        second = torch.autograd.grad(gradients, upstream, given, create_graph=True)
        moved = {t.name: g.detach() for t, g in zip(names, given, strict=True)}
        moved = {**made.batch.inputs, **moved}
        expected = made.call(*moved.values())
        third = torch.autograd.grad(second, given, [t.detach() for t in upstream])
        for found, wanted in zip((*second, *third), (*expected, *gradients), strict=True):
            assert_same_bits(found.detach(), wanted.detach(), "derivative of higher order")

    @pytest.mark.parametrize("gradients", [False, True])
    def test_vmap_over_rows_is_refused_by_name(self, device: str, gradients: bool) -> None:
        """The batch is leading axes; a mapped parameter gradient would be rounded per slice."""
        made = sample(self.operator, device)
        tensors = made.leaves(None if gradients else ()).values()
        axes = tuple(0 if t.has_rows else None for t in self.operator.inputs)
        with pytest.raises(ArgumentError) as caught:
            torch.vmap(made.call, in_dims=axes)(*tensors)
        assert str(caught.value) == (
            f"{self.operator.name}: the batch must be leading axes, got torch.vmap; call it on "
            "the whole batch"
        )

    def test_batch_of_upstream_gradients_is_refused_by_name(self, device: str) -> None:
        """A vectorised Jacobian would map the backward over slices."""
        made = sample(self.operator, device)
        leaves = made.leaves()
        outputs = made.call(*leaves.values())
        batch = [torch.stack([t, t]) for t in made.batch.upstream.values()]
        named = [leaves[name] for name in made.differentiable]
        with pytest.raises(GradientError, match=f"^{self.operator.name}: .* one output gradient"):
            torch.autograd.grad(outputs, named, batch, is_grads_batched=True)


def _needed(operator: Operator, wanted: Sequence[str]) -> list[str]:
    """The names by which backward is asked for the gradients of these inputs."""
    flags = zip(operator.returned_gradients, operator.needed(wanted), strict=True)
    return [declared.name for declared, needed in flags if needed]


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for size in range(1, len(names) + 1):
        yield from combinations(names, size)


def _backward(made: Sample, wanted: Sequence[str]) -> tuple[torch.Tensor, ...]:
    """What the backward operator of torch returns."""
    published, scalars = made.published, made.batch.scalars.values()
    with torch.no_grad():
        results = published.forward_op(*made.batch.inputs.values(), *scalars, "auto")
        results = results if isinstance(results, tuple) else (results,)
        outputs = len(made.operator.outputs)
        kept = made.operator.kept(list(made.batch.inputs.values()), results[:outputs])
        needs = made.operator.needed(wanted)
        tensors = (*made.batch.upstream.values(), *kept, *results[outputs:])
        found = published.backward_op(*tensors, *scalars, *needs, "auto")
    return found if isinstance(found, tuple) else (found,)


def _first_gradients(made: Sample) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
    """Leaves, upstream gradients among them, and first gradients that keep their graph."""
    leaves = {n: t for n, t in made.leaves().items() if t.requires_grad}
    tensors = {**made.batch.inputs, **leaves}
    upstream = {f"d{n}": t.detach().requires_grad_() for n, t in made.batch.upstream.items()}
    outputs = made.call(*tensors.values())
    gradients = torch.autograd.grad(
        outputs, list(leaves.values()), list(upstream.values()), create_graph=True
    )
    return {**leaves, **upstream}, gradients
