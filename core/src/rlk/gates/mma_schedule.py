# SPDX-License-Identifier: Apache-2.0
"""mma_schedule: every tile the dispatcher may choose gives the same FP32 accumulators."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from rlk.arguments import dtype_name
from rlk.compare import first_mismatch
from rlk.gates.record import Mismatch, Record
from rlk.gates.verdict import Verdict
from rlk.launch import trace
from rlk.reduce import mma_chain
from rlk.reduce.mma_chain.hard_cases import LAYOUTS

# Which copy of a and of b each product of a layer reads: forward, gradient of x, of the weight;
# then what neither TMA nor 16-byte copies can read. Padded: so that they can, whatever K.
_READ = {
    "forward": ("k_major_padded", "k_major_padded"),
    "row_gradient": ("k_major_padded", "row_major_padded"),
    "parameter_gradient": ("row_major_padded", "row_major_padded"),
    "unaligned": ("unaligned", "unaligned"),
}
# 12: powers of two over which the operands of one step spread, up and down.
_SPREAD = 12


@dataclass(frozen=True)
class Matrix:
    """Which products are formed: rows M of a, K, rows N of b, and where a chain is cut in two."""

    rows: tuple[int, ...]
    depths: tuple[int, ...]
    columns: int
    cuts: tuple[int, ...]
    reads: tuple[str, ...] = tuple(_READ)


# 1040 and 144: more than any tile, and no multiple of one.
MATRICES = {
    "short": Matrix((1, 17, 257), (16, 100, 256), 144, (64,), ("forward", "unaligned")),
    "full": Matrix(
        (1, 2, 3, 8, 16, 17, 64, 257, 1024, 2048), (8, 16, 64, 100, 128, 256, 3072), 1040,
        (16, 48, 1024, 1600),
    ),
}  # fmt: skip


def mma_schedule(verdict: Verdict) -> list[Record]:
    """The records of a case: one for each tile, layout and question."""
    module = mma_chain.backend_module(verdict.case.backend)
    matrix = MATRICES[verdict.case.tier]
    return judge_schedule(verdict, module, matrix)


def judge_schedule(verdict: Verdict, module: Any, matrix: Matrix) -> list[Record]:
    """The same of a module's `product` and `candidates`, on a matrix of products."""
    case = verdict.case
    with trace() as launches:
        judged = [
            (read, tile, question, *compared(ask(Chains(module, tile, read, case, matrix))))
            for read in matrix.reads
            for tile in _tiles(module, read, case, matrix)
            for question, ask in QUESTIONS.items()
        ]
    _drawn.cache_clear()
    verdict.candidate.launches += launches
    ran = sorted({launch.backend for launch in launches})
    wrong = () if ran == [case.backend] else (f"requested {case.backend}, ran {ran}",)
    records = []
    for read, tile, question, count, fault, mismatch in judged:
        faults = wrong + ((fault,) if fault else ())
        records.append(
            verdict.record(
                "chain",
                faults if count else (*faults, "nothing was compared"),
                config=f"{question} {read} {tile}",
                config_pair="reference_tile",
                shape=[max(matrix.rows), matrix.columns],
                dtype=case.dtype,
                comparisons=count,
                first_mismatch=mismatch,
            )
        )
    return records


Pair = tuple[str, torch.Tensor, torch.Tensor]  # where, actual, expected


@dataclass(frozen=True)
class Chains:
    """Products of one tile beside those of the reference: the first tile, at the most rows."""

    module: Any
    tile: Any
    read: str
    case: Any
    matrix: Matrix

    def operands(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """a [most rows, K] and b [N, K], whose exponents spread within every step."""
        return operands(self.case, self.matrix, self.read, k)

    def run(self, a: torch.Tensor, b: torch.Tensor, initial: Any = None) -> torch.Tensor:
        """The FP32 result of this tile."""
        result: torch.Tensor = self.module.product(a, b, None, initial, torch.float32, self.tile)
        return result

    def reference(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The FP32 result of the reference."""
        first = self.module.candidates(a, b)[0]
        result: torch.Tensor = self.module.product(a, b, None, None, torch.float32, first)
        return result


def same_chain(chains: Chains) -> Iterator[Pair]:
    """Any tile, number of rows and K: the bits of the reference."""
    for k in chains.matrix.depths:
        a, b = chains.operands(k)
        expected = chains.reference(a, b)
        for m in chains.matrix.rows:
            yield f"M={m} K={k}", chains.run(a[:m], b), expected[:m]


def continued_chain(chains: Chains) -> Iterator[Pair]:
    """Stored at a multiple of the step and continued by this tile: the bits of one chain."""
    k = max(chains.matrix.depths)
    a, b = chains.operands(k)
    expected = chains.reference(a, b)
    step = 32 if chains.case.dtype == "float32" else 16
    for cut in (cut for cut in chains.matrix.cuts if cut % step == 0):
        first = chains.reference(a[:, :cut], b[:, :cut])
        rest = chains.run(a[:, cut:], b[:, cut:], first)
        yield f"K={k} cut at {cut}", rest, expected


def zero_step(chains: Chains) -> Iterator[Pair]:
    """Rows of zeros beside finite numbers change no accumulator, but -0 to +0."""
    a, b = chains.operands(64)
    generator = torch.Generator().manual_seed(chains.case.seed)
    shape = a.shape[0], b.shape[0]
    bits = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
    special = torch.tensor([0.0, -0.0, 2.0**-149, torch.finfo(torch.float32).max, torch.inf])
    start = bits.view(torch.float32)
    start[0, : len(special)] = special
    # A NaN may come back with another payload.
    start = torch.where(start.isnan(), 0.0, start).to(a.device)
    expected = torch.where(start == 0, 0.0, start)
    yield "zeros times finite", chains.run(torch.zeros_like(a), b, start), expected
    yield "zeros", chains.run(torch.zeros_like(a), torch.zeros_like(b), start), expected


QUESTIONS: dict[str, Callable[[Chains], Iterator[Pair]]] = {
    "same_chain": same_chain,
    "continued_chain": continued_chain,
    "zero_step": zero_step,
}


def operands(case: Any, matrix: Matrix, read: str, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """a and b of a product, in the layouts of `read` on the device of the case."""
    of_a, of_b = _READ[read]
    looks = case.dtype, case.device, case.seed, k
    return _drawn(max(matrix.rows), of_a, *looks), _drawn(matrix.columns, of_b, *looks)


# 32: the operands of all depths of a matrix, which its tiles share.
@lru_cache(maxsize=32)
def _drawn(
    rows: int, layout: str, dtype: str, device: torch.device, seed: int, k: int
) -> torch.Tensor:
    """Numbers [rows, K] whose exponents spread."""
    generator = torch.Generator().manual_seed(seed + rows)
    size = torch.rand(rows, k, generator=generator) * 2 - 1
    values = torch.randn(rows, k, generator=generator) * torch.exp2(_SPREAD * size)
    return LAYOUTS[layout](values.to(getattr(torch, dtype)).to(device))


def compared(pairs: Iterator[Pair]) -> tuple[int, str, Mismatch | None]:
    """How many pairs were compared, and the first that differs."""
    count = 0
    for where, actual, expected in pairs:
        count += 1
        same = actual.shape == expected.shape and actual.dtype == expected.dtype
        if not same:
            return count, f"{where}: {dtype_name(actual.dtype)} {list(actual.shape)}", None
        # On the device: most agree, and nothing is NaN.
        if torch.equal(actual.view(torch.int32), expected.contiguous().view(torch.int32)):
            continue
        found = first_mismatch(actual, expected)
        if found is not None:
            text = Mismatch(
                index=list(found.index), actual=found.actual, expected=found.expected,
                count=found.count,
            )  # fmt: skip
            return count, f"{where}: {found}", text
    return count, "", None


def _tiles(module: Any, read: str, case: Any, matrix: Matrix) -> tuple[Any, ...]:
    """What the dispatcher may choose for operands so read."""
    tiles: tuple[Any, ...] = module.candidates(*operands(case, matrix, read, 64))
    return tiles
