# SPDX-License-Identifier: Apache-2.0
"""Samples of tokens that lie on a GPU, and calls on them, for the tests of layer_norm_modulate."""

from collections.abc import Iterable

import torch

from rlk.execution import Execution
from rlk.test_support.on_gpu import BF16, assert_equal_bits, normal
from rlk_qwenimage import layer_norm_modulate
from rlk_qwenimage.layer_norm_modulate.operator import OPERATOR

INPUTS = ("x", "scale", "shift", "dout")
RESULTS = ("out", "mean", "rstd", "dx", "dscale", "dshift")
SUMS = ("dscale", "dshift")
_EXECUTION = Execution(OPERATOR)


def random_batch(samples: int, tokens: int, n: int, *, dtype=BF16, seed: int = 0) -> dict:
    """x, scale, shift and dout by name."""
    x, dout = (normal(samples, tokens, n, dtype=dtype, seed=4 * seed + i) for i in (0, 1))
    scale, shift = (normal(samples, n, dtype=dtype, seed=4 * seed + i) for i in (2, 3))
    return dict(zip(INPUTS, (x, scale, shift, dout), strict=True))


def results(batch: dict, backend: str, needs: Iterable[str] = ("x", "scale", "shift")) -> dict:
    """Outputs, saved state and the needed gradients by name."""
    inputs = [batch[name] for name in ("x", "scale", "shift")]
    forward = _EXECUTION.forward(*inputs, 1e-6, backend)
    flags = [name in needs for name in ("x", "scale", "shift")]
    gradients = _EXECUTION.backward(batch["dout"], *inputs, *forward[1:], 1e-6, *flags, backend)
    named = dict(zip(RESULTS, (*forward, *gradients), strict=True))
    kept = {"out", "mean", "rstd", *(f"d{name}" for name in needs)}
    return {name: tensor for name, tensor in named.items() if name in kept}


def train(batch: dict, backend: str) -> dict:
    """The public function and its gradients by name."""
    leaves = [batch[name].detach().requires_grad_() for name in ("x", "scale", "shift")]
    out = layer_norm_modulate(*leaves, backend=backend)
    gradients = torch.autograd.grad(out, leaves, batch["dout"])
    names = ("out", "dx", *SUMS)
    return dict(zip(names, (out.detach(), *gradients), strict=True))


def of_samples(batch: dict, which) -> dict:
    """These samples."""
    return {name: tensor[which] for name, tensor in batch.items()}


def of_tokens(batch: dict, which) -> dict:
    """These tokens of every sample."""
    return {n: t[:, which] if n in ("x", "dout") else t for n, t in batch.items()}


def assert_results(actual: dict, expected: dict, what: str, names: Iterable[str] = ()) -> None:
    """All results of a call, or some, against those of another."""
    for name in names or actual:
        assert_equal_bits(actual[name], expected[name], f"{name} {what}")
