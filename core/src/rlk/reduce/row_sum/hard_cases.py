# SPDX-License-Identifier: Apache-2.0
"""Rows whose sum shows its order, some with answers worked out by hand."""

import math

import torch

# One below and above a chunk and its half, primes, and row lengths of models.
LENGTHS = (1, 3, 127, 128, 129, 256, 257, 1000, 2048, 5120)

# 2^24: the first FP32 value that absorbs a 1.
BIG = 2.0**24


def rows(length: int, seed: int = 0) -> torch.Tensor:
    """[12, length] FP32: spread over 40 decades, cancelling, subnormal, overflowing, not finite."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(length, generator=generator)

    def uniform() -> torch.Tensor:
        return torch.rand(length, generator=generator)

    def at_random(value: float) -> torch.Tensor:
        row = normal()
        row[int(torch.randint(length, (1,), generator=generator))] = value
        return row

    pairs = normal() * torch.pow(10.0, 8 * uniform())
    cancelling = torch.cat([pairs, -pairs])[torch.randperm(2 * length, generator=generator)]
    return torch.stack(
        [
            normal(),
            normal() * torch.pow(10.0, 40 * uniform() - 20),
            normal() * torch.pow(10.0, 40 * uniform() - 20),
            cancelling[:length],
            cancelling[length:] + normal(),
            normal() * 2.0**-140,
            normal() * 2.0**-75,  # products are subnormal
            normal() * 2.0**126,
            torch.full((length,), -0.0),
            at_random(math.nan),
            at_random(math.inf),
            at_random(math.inf) + at_random(-math.inf),
        ]
    )


def placed(length: int, terms: dict[int, float]) -> torch.Tensor:
    """[1, length]: zeros but for the given terms."""
    row = torch.zeros(1, length)
    for index, value in terms.items():
        row[0, index] = value
    return row


def known_sums() -> dict[str, tuple[torch.Tensor, float]]:
    """Rows and their sums, each wrong in some other order."""
    return {
        "lane adds left to right": (placed(3, {0: BIG, 1: 1.0, 2: 1.0}), BIG),
        "lane does not start from its end": (placed(3, {0: 1.0, 1: 1.0, 2: BIG}), BIG + 2),
        "lane ends after 8 terms": (placed(10, {7: BIG, 8: 1.0, 9: 1.0}), BIG + 2),
        "lane has no fewer than 8 terms": (placed(9, {6: BIG, 7: 1.0, 8: 1.0}), BIG),
        "tree pairs lane 0 with 1": (placed(256, {0: BIG, 8: 1.0, 16: -BIG}), 0.0),
        "tree pairs 4 lanes with the next 4": (placed(256, {0: BIG, 32: 1.0, 64: -BIG}), 0.0),
        "tree pairs both halves last": (placed(256, {0: BIG, 128: 1.0, 127: -BIG}), 1.0),
        "chunk ends after 256 terms": (placed(258, {0: BIG, 256: 1.0, 257: 1.0}), BIG + 2),
        "chunks are added in ascending order": (placed(513, {0: 1.0, 256: BIG, 512: -BIG}), 0.0),
        "chunks are no tree": (placed(769, {0: BIG, 256: 1.0, 512: 1.0, 768: 1.0}), BIG),
        "sum of -0 is +0": (torch.full((1, 300), -0.0), 0.0),
        "subnormal terms count": (torch.full((1, 300), 2.0**-149), 300 * 2.0**-149),
    }
