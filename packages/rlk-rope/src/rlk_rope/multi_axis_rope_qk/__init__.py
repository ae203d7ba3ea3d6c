# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding of query and key in one launch."""

import torch

from rlk.publish import publish

from ..multi_axis_rope.tables import tables_for
from .operator import OPERATOR

__all__ = ["multi_axis_rope_qk"]

_published = publish(OPERATOR)


def multi_axis_rope_qk(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = True,
    rotary_dim: int | None = None,
    rounding: str = "separate",
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`multi_axis_rope` of a query and a key, in one launch and with the bits of two.

    Args:
        q: [B, S, H, D], FP32, BF16 or FP16, any strides, H and D >= 1; B may be no or several axes.
        k: [B, S, G, D], in the dtype of q; G may be smaller than H, or larger.
        cos: [S, rotary_dim / 2], the same for all samples, or [B, S, rotary_dim / 2]; FP32, any
            strides, without gradient.
        sin: as cos, with or without B.
        interleaved: True pairs columns 2p and 2p + 1, False p and p + rotary_dim / 2.
        rotary_dim: how many columns are turned, an even number; D if None. Others are copied.
        rounding: "separate" or "complex_eager", as for one tensor.
        backend: "golden", "triton" or another declared name; None follows `rlk.use_backend`.
    Returns:
        (q_out, k_out): as q and k, contiguous.
    Gradients: q, k, of any order; both in one launch.
    Raises:
        ArgumentError: shape, dtype, device or value does not fit; the message names the argument.
        BackendError: the requested backend, or every backend, cannot run here.
    """
    tables = tables_for(OPERATOR.name, "q", q, cos, sin, rotary_dim)
    scalars = {"interleaved": interleaved, "rounding": rounding}
    q_out, k_out = _published((q, k, *tables), scalars, backend)
    return q_out, k_out
