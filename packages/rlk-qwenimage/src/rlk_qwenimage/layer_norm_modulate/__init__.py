# SPDX-License-Identifier: Apache-2.0
"""Layer normalisation over the last axis, modulated by each sample's scale and shift."""

import torch

from rlk.publish import publish

from .operator import OPERATOR

__all__ = ["layer_norm_modulate"]

_published = publish(OPERATOR)


def layer_norm_modulate(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float = 1e-6,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Each token of `x` normalised, then scaled and shifted as its sample says.

        out = (x - mean) * rstd * (1 + scale) + shift,  rstd = 1 / sqrt(sum((x - mean)^2) / N + eps)

    Args:
        x: [..., S, N], FP32, BF16 or FP16, any strides, N >= 1; S and any leading axis may be 0.
        scale: [..., N], one row for each sample, in the dtype of x, any strides.
        shift: as scale.
        eps: added to the variance; unitless, finite, >= 0.
        backend: "golden", "triton" or another declared name; None follows `rlk.use_backend`.
    Returns:
        out: as x, contiguous. FP32 arithmetic, one rounding to the dtype of x at the end.
    Gradients: x, scale, shift. First order only. dscale and dshift are the correctly rounded exact
        sums over the S tokens of a sample, of dout * xhat and of dout, in the dtype of scale; +0
        without tokens.
    Order: mean, variance and both row sums of dx by row_sum along N; dscale and dshift by exact_sum
        along S.
    Raises:
        ArgumentError: shape, dtype, device or value does not fit; the message names the argument.
        BackendError: the requested backend, or every backend, cannot run here.
    Source: diffusers `QwenImageTransformerBlock._modulate` behind its affine-free LayerNorm, and
        `AdaLayerNormContinuous`; Ba, Kiros and Hinton 2016, Layer Normalization.
    """
    return _published((x, scale, shift), {"eps": eps}, backend)[0]
