# SPDX-License-Identifier: Apache-2.0
"""Batches that lie on a GPU, and their parts, for the tests of norms there."""

from dataclasses import replace

import torch

from rlk.gates.inputs import Fixture, default_scalars
from rlk.reduce import exact_sum
from rlk.test_support.on_gpu import BF16, assert_equal_bits, draws


def random_batch(norm, rows, n, *, dtype=BF16, seed=0) -> Fixture:
    """Normal inputs [rows, n] made on the GPU, a weight around 1, and upstream gradients."""
    normal = draws(dtype, seed)
    inputs = {t.name: normal(rows, n) for t in norm.operator.inputs if t.has_rows}
    inputs["weight"] = normal(n) * 0.5 + 1.0
    ordered = {t.name: inputs[t.name] for t in norm.operator.inputs}
    upstream = {t.name: normal(rows, n) for t in norm.operator.outputs}
    return Fixture(ordered, upstream, default_scalars(norm.operator))


def part(batch: Fixture, rows) -> Fixture:
    """These rows of a batch: a slice gives views, a list or tensor copies."""
    taken = {n: t if n == "weight" else t[rows] for n, t in batch.inputs.items()}
    return replace(batch, inputs=taken, upstream={n: t[rows] for n, t in batch.upstream.items()})


def chunks(batch: Fixture, size: int) -> list[Fixture]:
    """The batch in parts of `size` rows."""
    return [part(batch, slice(i, i + size)) for i in range(0, batch.rows, size)]


def row_tensors(results: dict) -> dict:
    """y, rstd and the row gradients."""
    return {name: tensor for name, tensor in results.items() if name != "state"}


def assert_rows(results: dict, whole: dict, rows) -> None:
    """The row tensors of a call against these rows of the whole batch's."""
    for name, tensor in row_tensors(results).items():
        assert_equal_bits(tensor, whole[name][rows], f"{name} of rows {rows}")


def merged(states: list, backend: str) -> torch.Tensor:
    """One state of the rows of all."""
    total = states[0]
    for state in states[1:]:
        total = exact_sum.merge(total, state, backend=backend)
    return total
