# SPDX-License-Identifier: Apache-2.0
"""The last norm of a diffusion transformer, modulated by the timestep embedding."""

import torch

from rlk.publish import publish

from .operator import OPERATOR

__all__ = ["AdaLayerNormContinuous", "final_adaln_out"]

_published = publish(OPERATOR)


def final_adaln_out(
    x: torch.Tensor,
    temb: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float = 1e-6,
    *,
    bias_sum: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Each token of `x` normalised, then scaled and shifted by a linear map of `temb`.

        out = (x - mean) * rstd * (1 + scale) + shift,  rstd = 1 / sqrt(sum((x - mean)^2) / H + eps)
        (scale, shift) = mod = act @ weight^T + bias,  act = silu(temb)

    The bits, and those of every gradient, are those of `layer_norm_modulate(x, scale, shift, eps)`
    behind `adaln_mod_projection(temb, weight, bias, "final")`.

    Args:
        x: [..., S, H], FP32, BF16 or FP16, any strides, H >= 1; S and any leading axis may be 0.
        temb: [..., K], one row for each sample, in the dtype of x, any strides.
        weight: [2 H, K], in the dtype of x; the rows of scale come first.
        bias: [2 H], in the dtype of x or FP32.
        eps: added to the variance; unitless, finite, >= 0.
        bias_sum: where the gradient of bias goes unrounded: a carrier of `rlk.exact_grad`, FP64
            [13, 2 H]. The exact state is added to its `.grad`, and that of bias is zeros.
        backend: "golden", "triton" or another declared name; None follows `rlk.use_backend`.
    Returns:
        out: as x, contiguous. FP32 arithmetic with three roundings to the dtype of x: of act, of
        mod, which is stored once and read forward and backward, and of out.
    Gradients: x, temb, weight, bias. First order only. The gradient of mod holds the correctly
        rounded exact sums over tokens of dout * xhat and of dout, rounded once to the dtype of x;
        dtemb, dweight and dbias come from it as in `adaln_mod_projection`.
    Order: mod by mma_chain along K; mean, variance and both row sums of dx by row_sum along H; the
        gradient of mod by exact_sum along S; dtemb by mma_chain along N; dweight by mma_chain along
        T; dbias by exact_sum along T.
    Raises:
        ArgumentError: shape, dtype, device or value does not fit; the message names the argument.
        BackendError: the requested backend, or every backend, cannot run here.
    Source: diffusers `AdaLayerNormContinuous` without affine parameters, as `norm_out` of
        `QwenImageTransformer2DModel`.
    """
    return _published((x, temb, weight, bias), {"eps": eps}, backend, (bias_sum,))[0]


# Last, as the module calls the function above.
from .module import AdaLayerNormContinuous  # noqa: E402
