# SPDX-License-Identifier: Apache-2.0
"""What a place in a model read and got in one training step, seen again in other company."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

ARRANGEMENTS = ("alone", "chunked", "permuted", "padded")


def refuse_without(error: ModuleNotFoundError, example: str, distribution: str) -> NoReturn:
    """End an example, with exit status 2, that lacks a package which the distribution brings."""
    told = f"{example}: {error.name} must be installed, got none"
    print(f'{told}; pip install "./packages/{distribution}"', file=sys.stderr)
    sys.exit(2)


Results = dict[str, torch.Tensor]
Counts = dict[str, dict[str, int]]
INTEGERS = {2: torch.int16, 4: torch.int32}


def differing_bits(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Where two tensors of one shape and dtype have other bits, every NaN equal to every NaN.

    On their device: sites of a real model have gigabytes to compare.
    """
    integer = INTEGERS[actual.element_size()]
    other = actual.contiguous().view(integer) != expected.contiguous().view(integer)
    return other & ~(actual.isnan() & expected.isnan())


@dataclass
class Recorded:
    """What one site read in the training step, as rows, and the gradient of what it returned."""

    inputs: list[torch.Tensor] = field(default_factory=list)  # [R, ...] each
    dy: torch.Tensor | None = None  # [R, ...]

    def rows(self, index: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The inputs and dy of these rows."""
        return [tensor[index] for tensor in self.inputs], self.dy[index]


@dataclass(frozen=True)
class Replay:
    """How a site computes. Of its results, `parameters` are sums over rows, all others rows.

    Those in `ordered` are promised to rows in their order alone. `chunked` makes the parameters'
    results of rows that arrive in these chunks from the results of each; it may leave some out.
    """

    run: Callable[[list[torch.Tensor], torch.Tensor], Results]
    parameters: tuple[str, ...]
    ordered: tuple[str, ...] = ()
    chunked: Callable[[list[torch.Tensor], list[Results]], Results] = lambda chunks, parts: {}

    def rows_of(self, results: Results) -> Results:
        """The results that belong to rows."""
        return {name: t for name, t in results.items() if name not in self.parameters}

    def arrangements(
        self, recorded: Recorded, count: int
    ) -> Iterator[tuple[str, torch.Tensor, Results]]:
        """(arrangement, the rows it holds in order, its results) in other company."""
        total = recorded.dy.shape[0]
        every = torch.arange(total, device=recorded.dy.device)
        for row in every[:: max(1, total // count)].split(1):
            yield "alone", row, self.rows_of(self.run(*recorded.rows(row)))
        # A length that divides nothing, so that the last chunk is a short one.
        chunks = list(every.split(total // 3 + 1))
        parts = [self.run(*recorded.rows(chunk)) for chunk in chunks]
        joined = {name: torch.cat([p[name] for p in parts]) for name in self.rows_of(parts[0])}
        yield "chunked", every, {**joined, **self.chunked(chunks, parts)}
        order = torch.randperm(total, generator=torch.Generator().manual_seed(1)).to(every.device)
        found = self.run(*recorded.rows(order))
        yield "permuted", order, {n: t for n, t in found.items() if n not in self.ordered}
        empty = total // 4 + 3
        inputs, dy = recorded.rows(every)
        padded = [
            torch.cat([tensor, torch.zeros_like(tensor[:1]).expand(empty, *tensor.shape[1:])])
            for tensor in (*inputs, dy)
        ]
        found = self.run(padded[:-1], padded[-1])
        rows = {name: tensor[:total] for name, tensor in self.rows_of(found).items()}
        yield "padded", every, {**found, **rows}

    def differing(self, recorded: Recorded, count: int) -> Counts:
        """For each arrangement and result, the vectors (of parameters: elements) of other bits.

        "rows" counts the rows of which anything differs.
        """
        whole = self.run(*recorded.rows(slice(None)))
        counts: dict[str, Counter[str]] = {name: Counter() for name in ARRANGEMENTS}
        for arrangement, rows, found in self.arrangements(recorded, count):
            differs = torch.zeros(rows.shape, dtype=torch.bool, device=rows.device)
            for name, tensor in found.items():
                in_rows = name not in self.parameters
                expected = whole[name][rows] if in_rows else whole[name]
                other = differing_bits(tensor, expected)
                if in_rows:
                    other = other.any(-1)
                    differs |= other.reshape(len(rows), -1).any(-1)
                counts[arrangement][name] += int(other.sum())
            counts[arrangement]["rows"] += int(differs.sum())
        return {name: dict(counter) for name, counter in counts.items()}
