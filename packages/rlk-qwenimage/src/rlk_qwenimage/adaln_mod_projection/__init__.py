# SPDX-License-Identifier: Apache-2.0
"""Shifts, scales and gates of adaptive layer normalisation, from the timestep embedding."""

from typing import NamedTuple

import torch

from rlk.errors import ArgumentError
from rlk.publish import publish

from .operator import OPERATOR

__all__ = [
    "BlockModulation",
    "FinalModulation",
    "Modulation",
    "ModulationLinear",
    "adaln_mod_projection",
]

_published = publish(OPERATOR)
# How many parts a stream cuts mod in.
_PARTS = {"img": 6, "txt": 6, "final": 2}


class Modulation(NamedTuple):
    """What one norm of a block is modulated by, each [..., N / 6]."""

    shift: torch.Tensor
    scale: torch.Tensor
    gate: torch.Tensor


class BlockModulation(NamedTuple):
    """The modulations of both norms of a block."""

    norm1: Modulation
    norm2: Modulation


class FinalModulation(NamedTuple):
    """What the last norm is modulated by, each [..., N / 2]. Here the scale comes first."""

    scale: torch.Tensor
    shift: torch.Tensor


def adaln_mod_projection(
    temb: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    stream: str,
    *,
    bias_sum: torch.Tensor | None = None,
    backend: str | None = None,
) -> BlockModulation | FinalModulation:
    """The modulation of a sample: a linear map of its activated timestep embedding.

        mod = act @ weight^T + bias,  act = silu(temb) rounded to the dtype of temb

    Args:
        temb: [..., K], FP32, BF16 or FP16, any strides, K >= 1. A row is a sample.
        weight: [N, K], in the dtype of temb.
        bias: [N], in the dtype of temb or FP32.
        stream: "img" or "txt": mod holds shift, scale and gate of norm1, then of norm2, and N is
            divisible by 6. "final": scale, then shift; N is divisible by 2.
        bias_sum: where the gradient of bias goes unrounded: a carrier of `rlk.exact_grad`, FP64
            [13, N]. The exact state is added to its `.grad`, and that of bias is zeros.
        backend: "golden", "triton" or another declared name; None follows `rlk.use_backend`.
    Returns:
        BlockModulation for "img" and "txt", FinalModulation for "final": views of one tensor
        mod [..., N] in the dtype of temb. SiLU in FP32 and one rounding, which is `act`; FP32
        accumulation, bias added in FP32, and one rounding at the end.
    Gradients: temb, weight, bias. First order only. dtemb = dact * silu'(temb), where dact and the
        product with it are FP32: one rounding at the end, to the dtype of temb. dweight is a sum
        over samples in ascending order, in the dtype of weight: samples without a gradient at the
        end of the batch change no bit of it, other places of a sample may. dbias is the correctly
        rounded exact sum over samples, in the dtype of bias.
    Order: mod by mma_chain along K; dact by mma_chain along N; dweight by mma_chain along T; dbias
        by exact_sum along T.
    Raises:
        ArgumentError: shape, dtype, device or stream does not fit; the message names the argument.
        BackendError: the requested backend, or every backend, cannot run here.
    Source: diffusers `QwenImageTransformerBlock` (img_mod, txt_mod) and `AdaLayerNormContinuous`.
    """
    parts = _parts(weight, stream)
    (mod,) = _published((temb, weight, bias), {}, backend, (bias_sum,))
    cut = mod.chunk(parts, -1)
    if stream == "final":
        return FinalModulation(*cut)
    return BlockModulation(Modulation(*cut[:3]), Modulation(*cut[3:]))


def _parts(weight: torch.Tensor, stream: str) -> int:
    """How many parts mod has, each of the same width."""
    parts = _PARTS.get(stream) if isinstance(stream, str) else None
    if parts is None:
        names = ", ".join(_PARTS)
        raise ArgumentError(f"{OPERATOR.name}: stream must be one of {names}, got {stream!r}")
    # A weight that is no matrix is refused by the operator.
    if isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.shape[0] % parts:
        raise ArgumentError(
            f"{OPERATOR.name}: weight must be [N, K] with N divisible by {parts} for stream "
            f"{stream!r}, got {list(weight.shape)}"
        )
    return parts


# Last, as the module calls what stands above.
from .module import ModulationLinear  # noqa: E402
