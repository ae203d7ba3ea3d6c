# SPDX-License-Identifier: Apache-2.0
"""The RMS normalisation with the bits of vLLM's compiled kernel."""

import torch

from rlk.publish import publish

from .operator import OPERATOR

__all__ = ["rms_norm_vllm"]

published = publish(OPERATOR)


def rms_norm_vllm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    *,
    weight_sum: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """`rms_norm` with the GPU's own reciprocal root: `rms_norm(x, weight, rounding="vllm")`.

        y = x * rstd * (weight_offset + weight),  rstd = rsqrt(sum(x^2) / N + eps)

    Args:
        x: [..., N] on an NVIDIA GPU, FP32, BF16 or FP16, any strides, N >= 1.
        weight: [N], in the dtype of x or FP32.
        eps: added to the mean square; unitless, finite, >= 0.
        weight_offset: added to the weight in FP32, only when it is not 0.
        weight_sum: where the gradient of weight goes unrounded: a carrier of `rlk.exact_grad`, FP64
            [13, N]. The exact state is added to its `.grad`, and that of weight is zeros.
        backend: "cuda" or "triton"; None follows `rlk.use_backend`.
    Returns:
        y: as x, contiguous. FP32 arithmetic, one rounding to the dtype of x at the end.
    Gradients: x, weight, by the same rstd. First order only. dweight is the correctly rounded exact
        sum over rows of dy * (x * rstd), in the dtype of weight.
    Order: mean square and row dot product by row_sum along N; dweight by exact_sum along T.
    Raises:
        ArgumentError: shape, dtype, device or value does not fit; the message names the argument.
        BackendError: the requested backend cannot run here.
        PlatformError: the device is no NVIDIA GPU.
    """
    scalars = {"eps": eps, "weight_offset": weight_offset}
    return published((x, weight), scalars, backend, (weight_sum,))[0]
