# SPDX-License-Identifier: Apache-2.0
"""What one call of a declared operator must move, and the tensors it is measured on."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rlk.arguments import dtype_name
from rlk.gates.inputs import default_scalars
from rlk.operator import Operator, Tensor

# 150 MB: what each tensor rotates through, three times the L2 cache of an H200.
ROTATED_BYTES = 150_000_000
# 400: sets of tensors at most; small sizes rotate through less.
MOST_SETS = 400


@dataclass(frozen=True)
class Work:
    """One operator at one size in one dtype."""

    operator: Operator
    site: str
    sizes: Mapping[str, int]
    dtype: torch.dtype
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Such as 65536x2048."""
        return "x".join(str(size) for size in self.sizes.values())

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
        """The shape of a declared tensor, its leading axes flattened."""
        return [self.sizes["T" if symbol == "..." else symbol] for symbol in tensor.shape]

    def streams(self, direction: str) -> tuple[int, int]:
        """How many tensors with rows and gradients a direction reads and writes at least."""
        inputs = sum(t.gradient == "row" for t in self.operator.inputs)
        outputs = sum(t.has_rows for t in self.operator.outputs)
        if direction == "forward":
            return inputs, outputs
        return outputs if self.operator.linear else outputs + inputs, inputs

    def least_bytes(self, direction: str) -> int:
        """Each input read once and each output written once; saved state is not counted."""
        inputs = sum(map(self.bytes_of, self.operator.inputs))
        outputs = sum(map(self.bytes_of, self.operator.outputs))
        if direction == "forward":
            return inputs + outputs
        gradients = sum(map(self.bytes_of, self.operator.differentiable))
        # A linear operator's gradient reads no value of what it is linear in.
        return outputs + inputs + (0 if self.operator.linear else gradients)

    def inputs(self, seed: int, device: str) -> list[torch.Tensor]:
        """Random inputs that take gradients where declared."""
        generator = torch.Generator(device).manual_seed(seed)
        return [
            self._normal(t, generator).requires_grad_(t.gradient is not None)
            for t in self.operator.inputs
        ]

    def upstream(self, seed: int, device: str) -> list[torch.Tensor]:
        """Random gradients of the outputs."""
        generator = torch.Generator(device).manual_seed(seed + 10_000)
        return [self._normal(t, generator) for t in self.operator.outputs]

    def scalars(self) -> dict[str, Any]:
        """What a caller may set, at its default."""
        free = {s.name for s in self.operator.free_scalars}
        return {n: v for n, v in default_scalars(self.operator).items() if n in free}

    def _normal(self, tensor: Tensor, generator: torch.Generator) -> torch.Tensor:
        shape, device = self.shape(tensor), generator.device
        return torch.randn(shape, generator=generator, device=device, dtype=self.dtype_of(tensor))


def works(operator: Operator, dtype: torch.dtype, rows: list[int]) -> list[Work]:
    """Every declared workload, at its own number of rows and at others."""
    found: list[Work] = []
    for workload in operator.workloads:
        for count in dict.fromkeys([workload.sizes["T"], *rows]):
            sizes = {**workload.sizes, "T": count}
            if any(work.sizes == sizes for work in found):
                continue
            found.append(Work(operator, workload.site, sizes, dtype, workload.arguments))
    return found
