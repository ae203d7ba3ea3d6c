# SPDX-License-Identifier: Apache-2.0
"""Comparison of raw bits: +0 and -0 differ, every NaN equals every NaN."""

import hashlib
from dataclasses import dataclass

import torch

from rlk.arguments import dtype_name

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Mismatch:
    """Where two tensors first differ, and how much."""

    index: tuple[int, ...]
    count: int
    total: int
    actual: str
    expected: str
    ulp_histogram: dict[str, int]

    def __str__(self) -> str:
        return (
            f"{self.count} of {self.total} elements differ, first at {list(self.index)}: "
            f"{self.actual} instead of {self.expected}; ulp {self.ulp_histogram}"
        )


def raw_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bit pattern of each element as integers, every NaN replaced by one pattern."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.is_floating_point():
        tensor = torch.where(torch.isnan(tensor), torch.full_like(tensor, float("nan")), tensor)
    return tensor.view(_INTEGER[tensor.element_size()])


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether shape, dtype and every bit agree."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    return torch.equal(raw_bits(actual), raw_bits(expected))


def first_mismatch(actual: torch.Tensor, expected: torch.Tensor) -> Mismatch | None:
    """The lowest-index difference of two tensors of one shape and dtype, or None."""
    a, e = raw_bits(actual), raw_bits(expected)
    differs = (a != e).flatten()
    count = int(differs.sum())
    if count == 0:
        return None
    flat = int(differs.nonzero()[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), a.shape))
    return Mismatch(
        index=index,
        count=count,
        total=differs.numel(),
        actual=_describe(actual, flat),
        expected=_describe(expected, flat),
        ulp_histogram=ulp_histogram(actual, expected),
    )


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str = "tensor") -> None:
    """Raise AssertionError with the first differing element unless all bits agree."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise AssertionError(
            f"{what} is {dtype_name(actual.dtype)} {list(actual.shape)}, "
            f"expected {dtype_name(expected.dtype)} {list(expected.shape)}"
        )
    mismatch = first_mismatch(actual, expected)
    if mismatch is not None:
        raise AssertionError(f"{what}: {mismatch}")


def ulp_distance(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Representable values between two floating-point tensors, as int64; NaN to NaN is 0."""

    def ordered(tensor: torch.Tensor) -> torch.Tensor:
        bits = raw_bits(tensor).long()
        lowest = -(1 << (tensor.element_size() * 8 - 1))
        return torch.where(bits < 0, lowest - bits, bits)

    a, e = ordered(actual), ordered(expected)
    difference = a - e
    # Float64 of opposite signs can be further apart than int64 counts.
    overflow = torch.logical_xor(a < e, difference < 0)
    return difference.abs().masked_fill(overflow, torch.iinfo(torch.int64).max)


def ulp_histogram(actual: torch.Tensor, expected: torch.Tensor) -> dict[str, int]:
    """Elements by ulp distance, in classes 0, 1, 2, 3-4, 5-8, ..."""
    if not actual.is_floating_point():
        return {}
    distance = ulp_distance(actual, expected).flatten()
    classes = torch.where(
        distance < 2, distance, torch.ceil(torch.log2(distance.clamp(min=1).double())).long() + 1
    )
    values, counts = torch.unique(classes, return_counts=True)

    def label(k: int) -> str:
        low, high = (k, k) if k < 2 else (2 ** (k - 2) + 1, 2 ** (k - 1))
        return str(low) if low == high else f"{low}-{high}"

    return {label(int(k)): int(n) for k, n in zip(values, counts, strict=True)}


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of shape, dtype and raw bits, with one canonical NaN."""
    head = f"{tensor.dtype} {list(tensor.shape)}\n".encode()
    return hashlib.sha256(head + raw_bits(tensor).numpy().tobytes()).hexdigest()


def _describe(tensor: torch.Tensor, flat: int) -> str:
    value = tensor.detach().cpu().flatten()[flat]
    bits = int(raw_bits(value.reshape(1)).item()) & ((1 << (tensor.element_size() * 8)) - 1)
    return f"{value.item()!r} (0x{bits:0{tensor.element_size() * 2}x})"
