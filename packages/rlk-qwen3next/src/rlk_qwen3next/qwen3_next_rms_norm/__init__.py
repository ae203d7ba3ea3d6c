# SPDX-License-Identifier: Apache-2.0
"""The zero-centred RMS normalisation of Qwen3-Next."""

import torch

from rlk.publish import publish

from .operator import OPERATOR

__all__ = ["Qwen3NextRMSNorm", "qwen3_next_rms_norm"]

_published = publish(OPERATOR)


def qwen3_next_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    rounding: str = "ieee",
    weight_sum: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Each row of `x` divided by its root mean square, times one plus a weight.

        y = x * rstd * (1 + weight),  rstd = 1 / sqrt(sum(x^2) / N + eps)

    The kernels are those of `rms_norm` with weight_offset 1: equal, bit for bit, to `rms_norm`
    with the FP32 weight `1 + weight`, and not to a weight folded into BF16.

    Args:
        x: [..., N], FP32, BF16 or FP16, any strides, N >= 1.
        weight: [N], in the dtype of x or FP32; a zero weight gives the bare normalised rows.
        eps: added to the mean square; unitless, finite, >= 0.
        rounding: "ieee": rstd by IEEE square root and division.
        weight_sum: where the gradient of weight goes unrounded: a carrier of `rlk.exact_grad`, FP64
            [13, N]. The exact state is added to its `.grad`, and that of weight is zeros.
        backend: "golden", "triton" or another declared name; None follows `rlk.use_backend`.
    Returns:
        y: as x, contiguous. FP32 arithmetic, one rounding to the dtype of x at the end.
    Gradients: x, weight. First order only. dweight is the correctly rounded exact sum over rows
        of dy * (x * rstd), in the dtype of weight.
    Order: mean square and row dot product by row_sum along N; dweight by exact_sum along T.
    Raises:
        ArgumentError: shape, dtype, device or value does not fit; the message names the argument.
        BackendError: the requested backend, or every backend, cannot run here.
    Source: transformers `Qwen3NextRMSNorm`.
    """
    return _published((x, weight), {"eps": eps, "rounding": rounding}, backend, (weight_sum,))[0]


# Last, as the module calls the function above.
from .module import Qwen3NextRMSNorm  # noqa: E402
