# SPDX-License-Identifier: Apache-2.0
"""The gated RMS normalisation that closes a Gated DeltaNet block."""

import torch

from rlk.publish import publish

from .operator import OPERATOR

__all__ = ["Qwen3NextRMSNormGated", "rms_norm_gated"]

_published = publish(OPERATOR)


def rms_norm_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    activation: str = "silu",
    weight_offset: float = 0.0,
    *,
    weight_sum: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Each row of `x` divided by its root mean square, times a weight and an activated gate.

        y = x * rstd * (weight_offset + weight) * act(gate),  rstd = 1 / sqrt(sum(x^2) / N + eps)

    Args:
        x: [..., N], FP32, BF16 or FP16, any strides, N >= 1.
        gate: as x.
        weight: [N], in the dtype of x or FP32.
        eps: added to the mean square; unitless, finite, >= 0.
        activation: "silu", its alias "swish", or "sigmoid".
        weight_offset: added to the weight in FP32, only when it is not 0, so that a weight
            of -0.0 keeps its sign.
        weight_sum: where the gradient of weight goes unrounded: a carrier of `rlk.exact_grad`, FP64
            [13, N]. The exact state is added to its `.grad`, and that of weight is zeros.
        backend: "golden", "triton" or another declared name; None follows `rlk.use_backend`.
    Returns:
        y: as x, contiguous. FP32 arithmetic, one rounding to the dtype of x at the end.
    Gradients: x, gate, weight. First order only. dweight is the correctly rounded exact sum over
        rows of dy * (x * rstd) * act(gate), in the dtype of weight.
    Order: mean square and row dot product by row_sum along N; dweight by exact_sum along T.
    Raises:
        ArgumentError: shape, dtype, device or value does not fit; the message names the argument.
        BackendError: the requested backend, or every backend, cannot run here.
    Source: transformers `Qwen3NextRMSNormGated`, which rounds the normalised rows before the
        weight; here FP32 is kept to the end, as flash-linear-attention and vLLM do.
    """
    scalars = {"eps": eps, "activation": activation, "weight_offset": weight_offset}
    return _published((x, gate, weight), scalars, backend, (weight_sum,))[0]


# Last, as the module calls the function above.
from .module import Qwen3NextRMSNormGated  # noqa: E402
