# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalisation over the last axis."""

from typing import overload

import torch

from rlk.errors import ArgumentError
from rlk.publish import publish

from .operator import OPERATOR

# After the declaration, from which these are derived.
from ..rms_norm_residual import published as _with_residual  # isort: skip
from ..rms_norm_residual_vllm import published as _with_residual_vllm  # isort: skip
from ..rms_norm_vllm import published as _vllm  # isort: skip

__all__ = ["RMSNorm", "rms_norm"]

# Without and with a residual.
_PUBLISHED = {
    "ieee": (publish(OPERATOR), _with_residual),
    "vllm": (_vllm, _with_residual_vllm),
}


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = ...,
    weight_offset: float = ...,
    *,
    residual: None = ...,
    rounding: str = ...,
    weight_sum: torch.Tensor | None = ...,
    backend: str | None = ...,
) -> torch.Tensor: ...


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = ...,
    weight_offset: float = ...,
    *,
    residual: torch.Tensor,
    rounding: str = ...,
    weight_sum: torch.Tensor | None = ...,
    backend: str | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = ...,
    weight_offset: float = ...,
    *,
    residual: torch.Tensor | None,
    rounding: str = ...,
    weight_sum: torch.Tensor | None = ...,
    backend: str | None = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    *,
    residual: torch.Tensor | None = None,
    rounding: str = "ieee",
    weight_sum: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Each row of `x` divided by its root mean square, times a weight.

        y = x * rstd * (weight_offset + weight),  rstd = 1 / sqrt(sum(x^2) / N + eps)

    Args:
        x: [..., N], FP32, BF16 or FP16, any strides, N >= 1.
        weight: [N], in the dtype of x or FP32.
        eps: added to the mean square; unitless, finite, >= 0.
        weight_offset: added to the weight in FP32, only when it is not 0, so that a weight
            of -0.0 keeps its sign.
        residual: as x. Given, the norm reads residual_out = x + residual, rounded once to the
            dtype of x, in its place, and returns that too.
        rounding: "ieee": rstd by IEEE square root and division. "vllm": by the reciprocal root of
            NVIDIA GPUs, as vLLM's kernels; on such GPUs alone.
        weight_sum: where the gradient of weight goes unrounded: a carrier of `rlk.exact_grad`, FP64
            [13, N]. The exact state is added to its `.grad`, and that of weight is zeros.
        backend: "golden", "triton" or another declared name; None follows `rlk.use_backend`.
    Returns:
        y: as x, contiguous. FP32 arithmetic, one rounding to the dtype of x at the end.
        With a residual (y, residual_out), both as x.
    Gradients: x, weight, residual. First order only. x and residual have one gradient, in one
        buffer; either output's may be missing. dweight is the correctly rounded exact sum over
        rows of dy * (x * rstd), in the dtype of weight.
    Order: mean square and row dot product by row_sum along N; dweight by exact_sum along T.
    Raises:
        ArgumentError: shape, dtype, device or value does not fit; the message names the argument.
        BackendError: the requested backend, or every backend, cannot run here.
        PlatformError: the device is none on which the rounding is defined.
    Source: Zhang and Sennrich 2019, Root Mean Square Layer Normalization; transformers
        `Qwen3NextRMSNorm` for the offset.
    """
    require_rounding(rounding)
    alone, with_residual = _PUBLISHED[rounding]
    scalars = {"eps": eps, "weight_offset": weight_offset}
    if residual is None:
        return alone((x, weight), scalars, backend, (weight_sum,))[0]
    y, residual_out = with_residual((x, residual, weight), scalars, backend, (weight_sum,))
    return y, residual_out


def require_rounding(rounding: object) -> None:
    """Refuse what is no rounding of this norm."""
    if not isinstance(rounding, str) or rounding not in _PUBLISHED:
        names = ", ".join(_PUBLISHED)
        raise ArgumentError(f"rms_norm: rounding must be one of {names}, got {rounding!r}")


# Last, as the module calls the function above.
from .module import RMSNorm  # noqa: E402
