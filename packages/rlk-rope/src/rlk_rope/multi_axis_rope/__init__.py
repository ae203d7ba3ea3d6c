# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding of one tensor."""

import torch

from rlk.publish import publish

from .operator import OPERATOR
from .tables import tables_for

__all__ = ["multi_axis_rope"]

_published = publish(OPERATOR)


def multi_axis_rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = True,
    rotary_dim: int | None = None,
    rounding: str = "separate",
    backend: str | None = None,
) -> torch.Tensor:
    """Pairs of columns of each head, turned by the angles of their token's position.

        y0 = x0 * cos - x1 * sin,  y1 = x0 * sin + x1 * cos

    Args:
        x: [B, S, H, D], FP32, BF16 or FP16, any strides, H and D >= 1; B may be no or several axes.
        cos: [S, rotary_dim / 2], the same for all samples, or [B, S, rotary_dim / 2]; FP32, any
            strides, without gradient.
        sin: as cos, with or without B.
        interleaved: True pairs columns 2p and 2p + 1, False p and p + rotary_dim / 2.
        rotary_dim: how many columns are turned, an even number; D if None. Others are copied.
        rounding: "separate" rounds each product and sum; "complex_eager" fuses as PyTorch's
            product of complex64 tensors on a GPU does.
        backend: "golden", "triton" or another declared name; None follows `rlk.use_backend`.
    Returns:
        y: as x, contiguous. FP32 arithmetic, one rounding to the dtype of x at the end.
    Gradients: x, of any order: dx is dy turned back, by the same kernel.
    Raises:
        ArgumentError: shape, dtype, device or value does not fit; the message names the argument.
        BackendError: the requested backend, or every backend, cannot run here.
    Source: diffusers `apply_rotary_emb_qwen` (adjacent pairs), transformers
        `apply_rotary_pos_emb` of Qwen3-Next (half-split, first quarter of the columns).
    """
    tables = tables_for(OPERATOR.name, "x", x, cos, sin, rotary_dim)
    scalars = {"interleaved": interleaved, "rounding": rounding}
    return _published((x, *tables), scalars, backend)[0]
