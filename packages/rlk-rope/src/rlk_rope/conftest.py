# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings as their callers see them, and the backends that compute them."""

from typing import Any

import pytest
import torch

from rlk import interpreter
from rlk.compare import assert_same_bits

# Before a kernel is imported: it decides there how it runs.
INTERPRETED = interpreter.enable_without_gpu()

NEEDS_INTERPRETER = pytest.mark.skipif(not INTERPRETED, reason="needs triton's interpreter")


class Rope:
    """Inputs, and a function's output and gradient."""

    def tables(self, *shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of random angles."""
        generator = torch.Generator().manual_seed(seed)
        angles = torch.rand(shape, generator=generator) * 6.28
        return angles.cos(), angles.sin()

    def normal(self, *shape: int, dtype: str = "float32", seed: int = 0) -> torch.Tensor:
        """Random values."""
        generator = torch.Generator().manual_seed(seed + 100)
        return torch.randn(shape, generator=generator).to(getattr(torch, dtype))

    def run(self, function: Any, x: torch.Tensor, dy: torch.Tensor, *rest: Any, **options: Any):
        """(y, dx)"""
        x = x.detach().requires_grad_()
        y = function(x, *rest, **options)
        return y.detach(), *torch.autograd.grad(y, x, dy)

    def assert_same(self, actual: Any, expected: Any) -> None:
        """Every result has the expected bits and is contiguous."""
        for name, found, wanted in zip(("y", "dx"), actual, expected, strict=True):
            assert_same_bits(found, wanted, name)
            if not found.is_contiguous():
                raise AssertionError(f"{name} is not contiguous: strides {found.stride()}")


@pytest.fixture
def rope():
    return Rope()


@pytest.fixture(params=["golden", pytest.param("triton", marks=NEEDS_INTERPRETER)])
def backend(request):
    return request.param


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def dtype(request):
    return request.param


@pytest.fixture(params=[True, False], ids=["adjacent", "split"])
def interleaved(request):
    return request.param


@pytest.fixture(params=["separate", "complex_eager"])
def rounding(request):
    return request.param
