# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalisation over the last axis."""

import torch

from rlk.errors import ArgumentError
from rlk.publish import publish

from .operator import OPERATOR

__all__ = ["RMSNorm", "rms_norm"]

_published = publish(OPERATOR)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    *,
    residual: None = None,
    rounding: str = "ieee",
    weight_sum: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Each row of `x` divided by its root mean square, times a weight.

        y = x * rstd * (weight_offset + weight),  rstd = 1 / sqrt(sum(x^2) / N + eps)

    Args:
        x: [..., N], FP32, BF16 or FP16, any strides, N >= 1.
        weight: [N], in the dtype of x or FP32.
        eps: added to the mean square; unitless, finite, >= 0.
        weight_offset: added to the weight in FP32, only when it is not 0, so that a weight
            of -0.0 keeps its sign.
        residual: reserved; must be None.
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
    Source: Zhang and Sennrich 2019, Root Mean Square Layer Normalization; transformers
        `Qwen3NextRMSNorm` for the offset.
    """
    if residual is not None:
        raise ArgumentError(
            "rms_norm: residual must be None, got a value; add the residual before the call"
        )
    scalars = {"eps": eps, "weight_offset": weight_offset, "rounding": rounding}
    return _published((x, weight), scalars, backend, (weight_sum,))[0]


# Last, as the module calls the function above.
from .module import RMSNorm  # noqa: E402
