# SPDX-License-Identifier: Apache-2.0
"""Ways to arrange the same rows into calls, and the way back to canonical order.

A row is known by (sample, token). `Arrangement` lists calls; a call lists canonical row numbers,
or PADDING for a row that belongs to nobody.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

PADDING = -1
# 7: shares no factor with the sample lengths, a warp or a block.
CHUNK_ROWS = 7
# 20: one more than the longest sample.
PADDED_LENGTH = 20
SAMPLE_ORDER = (2, 0, 3, 1)


@dataclass(frozen=True)
class Call:
    """Canonical row numbers in the order of one call, and the call's leading axes."""

    rows: tuple[int, ...]
    leading: tuple[int, ...]


@dataclass(frozen=True)
class Arrangement:
    """All calls of one configuration."""

    name: str
    calls: tuple[Call, ...]

    @property
    def covered(self) -> tuple[int, ...]:
        """The canonical rows it computes, ascending."""
        return tuple(sorted(r for call in self.calls for r in call.rows if r != PADDING))


def sample_rows(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Canonical row numbers of each sample."""
    ends = list(accumulate(lengths))
    return [tuple(range(end - n, end)) for end, n in zip(ends, lengths, strict=True)]


def one_call(name: str, rows: Sequence[int]) -> Arrangement:
    """All rows in one call."""
    return Arrangement(name, (Call(tuple(rows), (len(rows),)),))


def chunked(name: str, rows: Sequence[int], size: int) -> Arrangement:
    """Calls of at most `size` rows."""
    parts = [tuple(rows[i : i + size]) for i in range(0, len(rows), size)]
    return Arrangement(name, tuple(Call(part, (len(part),)) for part in parts))


def padded(name: str, samples: Sequence[Sequence[int]], right: bool) -> Arrangement:
    """One call of [samples, PADDED_LENGTH] rows, padding on one side."""
    rows: list[int] = []
    for sample in samples:
        fill = [PADDING] * (PADDED_LENGTH - len(sample))
        rows += [*sample, *fill] if right else [*fill, *sample]
    return Arrangement(name, (Call(tuple(rows), (len(samples), PADDED_LENGTH)),))


def short_matrix(lengths: Sequence[int]) -> list[Arrangement]:
    """The 13 configurations of the short gate; the first is canonical."""
    samples = sample_rows(lengths)
    everything = [r for sample in samples for r in sample]
    reordered = [r for s in SAMPLE_ORDER for r in samples[s]]
    return [
        one_call("canonical", everything),
        chunked("chunked_7", everything, CHUNK_ROWS),
        *(one_call(f"singleton_{i}", rows) for i, rows in enumerate(samples)),
        *(chunked(f"singleton_{i}_chunked_7", r, CHUNK_ROWS) for i, r in enumerate(samples)),
        one_call("permuted_2_0_3_1", reordered),
        padded("right_padded_20", samples, right=True),
        padded("left_padded_20", samples, right=False),
    ]


def gather(rows: torch.Tensor, call: Call, padding: torch.Tensor) -> torch.Tensor:
    """The rows of a call, `padding` [...] standing in for nobody's, with its leading axes."""
    index = torch.tensor(call.rows)
    picked = rows[index.clamp(min=0)].clone()
    picked[index == PADDING] = padding.to(rows.dtype)
    return picked.view(*call.leading, *rows.shape[1:])


def restore(
    arrangement: Arrangement, results: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[str]]:
    """Rows in canonical order from the results of each call, and what is wrong with the keys."""
    faults = []
    found: dict[int, torch.Tensor] = {}
    for call, result in zip(arrangement.calls, results, strict=True):
        if result.shape[: len(call.leading)] != call.leading:
            faults.append(f"result has shape {list(result.shape)}, call {list(call.leading)}")
            continue
        flat = result.reshape(len(call.rows), *result.shape[len(call.leading) :])
        for position, row in _keys(call):
            if row in found:
                faults.append(f"row {row} came back twice")
            found[row] = flat[position]
    missing = sorted(set(arrangement.covered) - set(found))
    if missing:
        faults.append(f"rows {missing} are missing")
    if not found:
        return torch.empty(0), faults
    return torch.stack([found[row] for row in sorted(found)]), faults


def _keys(call: Call) -> Iterator[tuple[int, int]]:
    return ((p, row) for p, row in enumerate(call.rows) if row != PADDING)
