# SPDX-License-Identifier: Apache-2.0
"""Batches of heads on a GPU, for the tests of rotary embeddings there."""

from typing import Any

import torch

from rlk.test_support.on_gpu import DEVICE, assert_equal_bits
from rlk_rope import multi_axis_rope, multi_axis_rope_qk


def tables(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of random angles."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    angles = torch.rand(*shape, generator=generator, device=DEVICE) * 6.28
    return angles.cos(), angles.sin()


def run(x: torch.Tensor, dy: torch.Tensor, cos: Any, sin: Any, **options: Any):
    """(y, dx)"""
    x = x.detach().requires_grad_()
    y = multi_axis_rope(x, cos, sin, **options)
    return y.detach(), *torch.autograd.grad(y, x, dy)


def run_qk(q: torch.Tensor, k: torch.Tensor, dq: Any, dk: Any, cos: Any, sin: Any, **options: Any):
    """(q_out, k_out, dq, dk)"""
    leaves = [t.detach().requires_grad_() for t in (q, k)]
    outputs = multi_axis_rope_qk(*leaves, cos, sin, **options)
    return *(t.detach() for t in outputs), *torch.autograd.grad(outputs, leaves, (dq, dk))


def assert_results(actual: Any, expected: Any, what: str) -> None:
    """All results of a call against those of another."""
    for found, wanted in zip(actual, expected, strict=True):
        assert_equal_bits(found, wanted, what)
