# SPDX-License-Identifier: Apache-2.0
"""What one call of a declared operator must move, and the tensors it is measured on."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlk.arguments import dtype_name
from rlk.errors import RlkError
from rlk.gates.inputs import default_scalars
from rlk.operator import Layout, Operator, Tensor

# 150 MB: what each tensor rotates through, three times the L2 cache of an H200.
ROTATED_BYTES = 150_000_000
# 2 GB: a tensor of further row counts; every variant keeps about ten of that size.
MOST_BYTES = 2_000_000_000
# 400: sets of tensors at most; small sizes rotate through less.
MOST_SETS = 400
# 3: query, key and value, which a projection packs into one tensor.
PACKED = 3


def size_of(shapes: Iterable[Sequence[int]]) -> str:
    """Shapes as records name a size, each once: 131x3072 and 131x6144."""
    return " and ".join(dict.fromkeys("x".join(map(str, shape)) for shape in shapes))


@dataclass(frozen=True)
class Work:
    """One operator at one size in one dtype and layout."""

    operator: Operator
    site: str
    sizes: Mapping[str, int]
    dtype: torch.dtype
    arguments: Mapping[str, Any] = field(default_factory=dict)
    layout: Layout = "contiguous"

    @property
    def label(self) -> str:
        """Such as 65536x2048: shapes of the tensors with row gradients, and what a call is told."""
        arguments = [f"{name}={value}" for name, value in self.arguments.items()]
        return " ".join([size_of(map(self.shape, self._rows)), *arguments])

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest input: rows, or the weight of few rows."""
        return max(self.bytes_of(t) for t in self.operator.inputs)

    @property
    def sets(self) -> int:
        """How many sets of tensors take turns."""
        return min(MOST_SETS, max(2, math.ceil(ROTATED_BYTES / self.most_bytes)))

    def bytes_of(self, tensor: Tensor) -> int:
        """Bytes of a declared tensor."""
        return math.prod(self.shape(tensor)) * self.dtype_of(tensor).itemsize

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """That of the measurement, unless the declaration has another."""
        first, narrow = tensor.dtype[0], dtype_name(self.dtype)
        own = first.startswith("=") or narrow in tensor.dtype
        return self.dtype if own else getattr(torch, first)

    def shape(self, tensor: Tensor) -> list[int]:
        """The shape of a declared tensor: all rows lie along the last of its row axes."""
        trailing = [self.sizes[symbol] for symbol in tensor.shape if symbol != "..."]
        return [*self._leading, *trailing] if tensor.has_rows else trailing

    def streams(self, direction: str) -> tuple[int, int]:
        """How many tensors a direction reads and writes at least: those that count, by bytes.

        A tensor below half of the largest, as scale and shift of many tokens, is no stream; each
        way has one at least.
        """
        moved = self._moved(direction)
        largest = max(self.bytes_of(t) for way in moved for t in way)
        reads, writes = (max(1, sum(2 * self.bytes_of(t) >= largest for t in way)) for way in moved)
        return reads, writes

    def least_bytes(self, direction: str) -> int:
        """Each input read once and each output written once; saved state is not counted.

        What lies between packed tensors is not counted either.
        """
        return sum(self.bytes_of(t) for way in self._moved(direction) for t in way)

    def inputs(self, seed: int, device: str) -> list[torch.Tensor]:
        """Random inputs that take gradients where declared; packed ones share one storage."""
        generator = torch.Generator(device).manual_seed(seed)
        packed = self._packed(generator) if self.layout == "packed" else {}
        made = [
            packed[t.name] if t.name in packed else self._normal(t, generator)
            for t in self.operator.inputs
        ]
        for declared, tensor in zip(self.operator.inputs, made, strict=True):
            tensor.requires_grad_(declared.gradient is not None)
        return made

    def upstream(self, seed: int, device: str) -> list[torch.Tensor]:
        """Random gradients of the outputs, contiguous."""
        generator = torch.Generator(device).manual_seed(seed + 10_000)
        return [self._normal(t, generator) for t in self.operator.outputs]

    def scalars(self) -> dict[str, Any]:
        """What a caller may set, as the workload says or at its default."""
        free = {s.name for s in self.operator.free_scalars}
        defaults = default_scalars(self.operator)
        return {n: self.arguments.get(n, v) for n, v in defaults.items() if n in free}

    def _moved(self, direction: str) -> tuple[list[Tensor], list[Tensor]]:
        """What a direction reads, and what it writes."""
        operator = self.operator
        if direction == "forward":
            return [*operator.inputs], [*operator.outputs]
        # Addends are read as their sum, and have one gradient.
        kept = dict.fromkeys(operator.kept(operator.inputs, operator.outputs))
        # A linear operator's gradient reads no value of what it is linear in.
        read = [t for t in kept if not (operator.linear and t.gradient)]
        return [*operator.outputs, *read], [*operator.returned_gradients]

    @property
    def _rows(self) -> list[Tensor]:
        return [t for t in self.operator.inputs if t.gradient == "row"]

    @property
    def _leading(self) -> list[int]:
        return [1] * (len(self.operator.row_axes) - 1) + [self.sizes["T"]]

    def _packed(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """The tensors with row gradients as views of one that holds three; the last repeats."""
        axis = len(self._leading)
        shapes = [self.shape(t)[axis:] for t in self._rows]
        if any(shape[1:] != shapes[0][1:] for shape in shapes) or len(shapes) > PACKED:
            raise RlkError(
                f"{self.operator.name}: packed tensors must be at most {PACKED} that differ along "
                f"their first axis alone, got {shapes}; choose the layout contiguous"
            )
        widths = [shape[0] for shape in shapes]
        widths += widths[-1:] * (PACKED - len(widths))
        dtype = self.dtype_of(self._rows[0])
        shape = [*self._leading, sum(widths), *shapes[0][1:]]
        whole = torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)
        return {
            t.name: whole.narrow(axis, sum(widths[:i]), widths[i]) for i, t in enumerate(self._rows)
        }

    def _normal(self, tensor: Tensor, generator: torch.Generator) -> torch.Tensor:
        shape, device = self.shape(tensor), generator.device
        return torch.randn(shape, generator=generator, device=device, dtype=self.dtype_of(tensor))


def works(
    operator: Operator, dtype: torch.dtype, rows: Sequence[int], layouts: Sequence[Layout] = ()
) -> list[Work]:
    """Every declared workload, at its own number of rows and at others, in its layouts or these.

    Others that would not fit into memory are left out: a row may be a whole sample.
    """
    found: dict[tuple[str, str], Work] = {}
    for workload in operator.workloads:
        told = {**workload.scalars, **workload.arguments}
        for count in dict.fromkeys([workload.sizes["T"], *rows]):
            for layout in layouts or workload.layouts:
                sizes = {**workload.sizes, "T": count}
                work = Work(operator, workload.site, sizes, dtype, told, layout)
                if count == workload.sizes["T"] or work.most_bytes <= MOST_BYTES:
                    found.setdefault((work.label, layout), work)
    return list(found.values())
