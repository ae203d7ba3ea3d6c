# SPDX-License-Identifier: Apache-2.0
"""Where else the elements of a tensor may lie on its device: each a copy of the same values."""

import torch


def shifted(t: torch.Tensor) -> torch.Tensor:
    """Contiguous, one element past an aligned address."""
    return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)


def spread(t: torch.Tensor) -> torch.Tensor:
    """Every other element along the last axis."""
    return _wider(t, 2 * t.shape[-1])[..., ::2].copy_(t)


def narrow(t: torch.Tensor) -> torch.Tensor:
    """A part of a wider tensor, as from `cat` or a packed projection; aligned as it was."""
    # 8: 16 bytes in BF16, which is what a load reads at once.
    return _wider(t, t.shape[-1] + 8)[..., : t.shape[-1]].copy_(t)


def narrow_misaligned(t: torch.Tensor) -> torch.Tensor:
    """The same, where rows begin at odd elements."""
    return _wider(t, t.shape[-1] + 3)[..., 3:].copy_(t)


def columns_first(t: torch.Tensor) -> torch.Tensor:
    """The last axis outermost."""
    return t.movedim(-1, 0).contiguous().movedim(0, -1)


def _wider(t: torch.Tensor, width: int) -> torch.Tensor:
    return t.new_empty(*t.shape[:-1], width)
