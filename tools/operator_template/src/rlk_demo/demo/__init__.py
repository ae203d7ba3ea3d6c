# SPDX-License-Identifier: Apache-2.0
"""Rows damped by their own mean square."""

import torch

from rlk.publish import publish

from .operator import OPERATOR

__all__ = ["demo"]

_published = publish(OPERATOR)


def demo(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    weight_sum: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Each row of `x` divided by one plus its mean square, times a weight.

        y = x * damping * weight,  damping = 1 / (1 + sum(x^2) / N)

    Args:
        x: [..., N], FP32, BF16 or FP16, any strides, N >= 1.
        weight: [N], in the dtype of x or FP32.
        weight_sum: where the gradient of weight goes unrounded: a carrier of `rlk.exact_grad`, FP64
            [13, N]. The exact state is added to its `.grad`, and that of weight is zeros.
        backend: "golden", "triton" or another declared name; None follows `rlk.use_backend`.
    Returns:
        y: as x, contiguous. FP32 arithmetic, one rounding to the dtype of x at the end.
    Gradients: x, weight. First order only. dweight is the correctly rounded exact sum over rows
        of dy * (x * damping), in the dtype of weight.
    Order: mean square and row dot product by row_sum along N; dweight by exact_sum along T.
    Raises:
        ArgumentError: shape, dtype or device does not fit; the message names the argument.
        BackendError: the requested backend, or every backend, cannot run here.
    """
    return _published((x, weight), {}, backend, (weight_sum,))[0]
