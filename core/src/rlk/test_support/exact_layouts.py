# SPDX-License-Identifier: Apache-2.0
"""A tiny model with exact gradients, and its training step cut in many ways; ranks import it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from rlk.compare import assert_same_bits
from rlk.exact_grad import ExactGradAccumulator
from rlk.publish import publish
from rlk.test_support.tiny import tiny_operator

WIDTH, SAMPLES = 5, 12
WHOLE = [(0, SAMPLES)]
EIGHT = [(0, 1), (1, 2), (2, 4), (4, 5), (5, 7), (7, 8), (8, 10), (10, 12)]
SCALARS = {"factor": 1.0}
# (first, behind the last) sample of each micro-batch, by rank.
Layout = Sequence[Sequence[tuple[int, int]]]


# y = x * peak * weight
published = publish(tiny_operator("tiny_exact_layouts"))


class Scale(nn.Module):
    """The operator as a module that says what is exact."""

    exact_sums = {"weight": "weight_sum"}
    weight_sum: torch.Tensor | None = None

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As x."""
        return published((x, self.weight), SCALARS, None, (self.weight_sum,))[0]


class Model(nn.Module):
    """Two exact weights, of which one is used twice, and an ordinary one that sees no batch."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.second = Scale(dtype), Scale(dtype)
        self.factor = nn.Parameter(torch.ones(WIDTH, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As x."""
        return self.second(self.first(self.second(x)) * self.factor)


# The same with a chain over rows: one row after another.
chained = publish(tiny_operator("tiny_chain_layouts", chain=True))


class Chain(nn.Module):
    """The operator whose weight has a chain over rows, as a module that says so."""

    chain_sums: ClassVar = {"weight": "weight_chain"}
    weight_chain: tuple[torch.Tensor, torch.Tensor] | None = None

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As x."""
        return chained((x, self.weight), SCALARS, None, self.weight_chain or ())[0]


# Of FP32 a step is 32 rows: three micro-batches of whole steps but the last.
CHAIN_ROWS, STEPS = 80, ((0, 32), (32, 64), (64, 80))


def chain_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [80, 5] and upstream gradients."""
    generator = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(CHAIN_ROWS, WIDTH, generator=generator) for _ in range(2))
    return x, dy


def chain_backward(model: nn.Module, pieces: Sequence[tuple[int, int]]) -> None:
    """A forward and a backward for each micro-batch of rows."""
    x, dy = chain_batch()
    for start, stop in pieces:
        y = model(x[start:stop])
        y.backward(dy[start:stop].to(y.dtype))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Samples [12, 3, 5] and upstream gradients whose sums depend on their order."""
    generator = torch.Generator().manual_seed(4)
    x, dy = (torch.randn(SAMPLES, 3, WIDTH, generator=generator) for _ in range(2))
    return x * torch.exp2(torch.arange(SAMPLES) % 2)[:, None, None], dy


def backward(model: nn.Module, pieces: Sequence[tuple[int, int]]) -> None:
    """A forward and a backward for each micro-batch."""
    x, dy = batch()
    for start, stop in pieces:
        model(x[start:stop]).backward(dy[start:stop])


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Those of exact parameters, by name."""
    named: dict[str, Any] = dict(model.named_parameters())
    return {n: p.grad.detach().clone() for n, p in named.items() if n.endswith("weight")}


def layouts(ranks: int) -> Iterator[Layout]:
    """Even and uneven cuts of the samples, over ranks and within each of them."""
    for sizes in (1, 2, 5):
        pieces = [(at, min(at + sizes, SAMPLES)) for at in range(0, SAMPLES, sizes)]
        yield [pieces[rank::ranks] for rank in range(ranks)]
    # All on the last rank but the first sample.
    yield [[(0, 1)], *([] for _ in range(ranks - 2)), [(1, SAMPLES)]] if ranks > 1 else [[(0, 12)]]


def accumulated(
    pieces: Sequence[tuple[int, int]], model: nn.Module | None = None, divide_by: int = 1
) -> dict[str, torch.Tensor]:
    """The exact gradients of these micro-batches."""
    model = model or Model()
    with ExactGradAccumulator(model) as sums:
        backward(model, pieces)
        sums.finalize(divide_by)
    return gradients(model)


def assert_same_gradients(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], where: object = ""
) -> None:
    """Every gradient is there, with the expected bits."""
    assert found.keys() == expected.keys() != set()
    for name, gradient in expected.items():
        assert_same_bits(found[name], gradient, f"{name} {where}")
