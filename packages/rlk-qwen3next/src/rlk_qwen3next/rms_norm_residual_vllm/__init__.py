# SPDX-License-Identifier: Apache-2.0
"""The RMS normalisation of a sum with the bits of vLLM's compiled kernel."""

import torch

from rlk.publish import publish

from .operator import OPERATOR

__all__ = ["rms_norm_residual_vllm"]

published = publish(OPERATOR)


def rms_norm_residual_vllm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    *,
    weight_sum: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm(x, weight, residual=residual, rounding="vllm")`: the GPU's own reciprocal root.

        residual_out = x + residual
        y = residual_out * rstd * (weight_offset + weight)
        rstd = rsqrt(sum(residual_out^2) / N + eps)

    Args:
        x: [..., N] on an NVIDIA GPU, FP32, BF16 or FP16, any strides, N >= 1.
        residual: as x.
        weight: [N], in the dtype of x or FP32.
        eps: added to the mean square; unitless, finite, >= 0.
        weight_offset: added to the weight in FP32, only when it is not 0.
        weight_sum: where the gradient of weight goes unrounded: a carrier of `rlk.exact_grad`, FP64
            [13, N]. The exact state is added to its `.grad`, and that of weight is zeros.
        backend: "cuda" or "triton"; None follows `rlk.use_backend`.
    Returns:
        (y, residual_out): as x, contiguous. The sum is rounded once to the dtype of x, and the
        norm reads what was rounded; y is rounded once, at the end.
    Gradients: x, residual, weight, by the same rstd. First order only. x and residual have one
        gradient, in one buffer; either output's may be missing. dweight is the correctly rounded
        exact sum over rows of dy * (residual_out * rstd), in the dtype of weight.
    Order: mean square and row dot product by row_sum along N; dweight by exact_sum along T.
    Raises:
        ArgumentError: shape, dtype, device or value does not fit; the message names the argument.
        BackendError: the requested backend cannot run here.
        PlatformError: the device is no NVIDIA GPU.
    """
    scalars = {"eps": eps, "weight_offset": weight_offset}
    y, residual_out = published((x, residual, weight), scalars, backend, (weight_sum,))
    return y, residual_out
