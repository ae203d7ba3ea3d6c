# SPDX-License-Identifier: Apache-2.0
"""Layer normalisation over the last axis, modulated by each sample's scale and shift."""

from typing import TYPE_CHECKING

import torch

from rlk.errors import ArgumentError
from rlk.publish import publish

from .operator import OPERATOR

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["layer_norm_modulate"]

_published = publish(OPERATOR)


def layer_norm_modulate(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float = 1e-6,
    *,
    token_group: "ProcessGroup | None" = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Each token of `x` normalised, then scaled and shifted as its sample says.

        out = (x - mean) * rstd * (1 + scale) + shift,  rstd = 1 / sqrt(sum((x - mean)^2) / N + eps)

    Args:
        x: [..., S, N], FP32, BF16 or FP16, any strides, N >= 1; S and any leading axis may be 0.
        scale: [..., N], one row for each sample, in the dtype of x, any strides.
        shift: as scale.
        eps: added to the variance; unitless, finite, >= 0.
        token_group: the ranks that share the tokens of each sample, in any division, some with
            none; None where a sample is whole. Scale and shift must be equal on all of them, and
            want gradients on all or none; each must run backward. See Gradients.
        backend: "golden", "triton" or another declared name; None follows `rlk.use_backend`.
    Returns:
        out: as x, contiguous. FP32 arithmetic, one rounding to the dtype of x at the end.
    Gradients: x, scale, shift. First order only. dscale and dshift are the correctly rounded exact
        sums over the S tokens of a sample, of dout * xhat and of dout, in the dtype of scale; +0
        without tokens. With token_group they are those of the tokens of all ranks, the same bytes
        on each of them: exact states, 104 bytes for each element of scale and of shift that wants a
        gradient, are added over the ranks before they are rounded.
    Order: mean, variance and both row sums of dx by row_sum along N; dscale and dshift by exact_sum
        along S.
    Raises:
        ArgumentError: shape, dtype, device or value does not fit; the message names the argument.
        BackendError: the requested backend, or every backend, cannot run here.
    Source: diffusers `QwenImageTransformerBlock._modulate` behind its affine-free LayerNorm, and
        `AdaLayerNormContinuous`; Ba, Kiros and Hinton 2016, Layer Normalization.
    """
    if token_group is None:
        return _published((x, scale, shift), {"eps": eps}, backend)[0]
    from .token_ranks import over_ranks

    group = getattr(token_group, "group_name", None)
    if group is None:
        raise ArgumentError(
            f"{OPERATOR.name}: token_group must be a torch.distributed.ProcessGroup, got "
            f"{type(token_group).__name__}"
        )
    arguments = _published.arguments((x, scale, shift), {"eps": eps}, backend)
    return over_ranks(*arguments[:-1], group, arguments[-1])[0]
