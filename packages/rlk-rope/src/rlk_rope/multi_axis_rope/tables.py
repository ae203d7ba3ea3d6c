# SPDX-License-Identifier: Apache-2.0
"""The tables of a call, one row for each token: shared ones are repeated without a copy."""

from typing import Any

import torch

from rlk.errors import ArgumentError


def tables_for(
    operator: str, name: str, x: Any, cos: Any, sin: Any, rotary_dim: int | None
) -> tuple[Any, Any]:
    """cos and sin as [..., rotary_dim / 2] with the leading axes of `x`, [..., H, D]."""
    if not isinstance(x, torch.Tensor) or x.dim() < 2:
        # What core says of x is all there is to say.
        return cos, sin
    pairs = _pairs(operator, name, x.shape[-1], rotary_dim)
    return (
        _for_each_token(operator, "cos", cos, x.shape[:-2], pairs),
        _for_each_token(operator, "sin", sin, x.shape[:-2], pairs),
    )


def _pairs(operator: str, name: str, columns: int, rotary_dim: int | None) -> int:
    if rotary_dim is None:
        if columns % 2:
            raise ArgumentError(
                f"{operator}: {name} must be [..., H, D] with an even D, got D={columns}; "
                "set rotary_dim"
            )
        return columns // 2
    fits = isinstance(rotary_dim, int) and not isinstance(rotary_dim, bool)
    if not fits or rotary_dim % 2 or not 2 <= rotary_dim <= columns:
        raise ArgumentError(
            f"{operator}: rotary_dim must be an even number from 2 to D={columns}, "
            f"got {rotary_dim!r}"
        )
    return rotary_dim // 2


def _for_each_token(operator: str, name: str, table: Any, leading: Any, pairs: int) -> Any:
    if not isinstance(table, torch.Tensor):
        return table
    if table.requires_grad:
        raise ArgumentError(
            f"{operator}: {name} must be without gradient, got requires_grad=True; detach it"
        )
    shared, each = (*leading[-1:], pairs), (*leading, pairs)
    if table.shape == each:
        return table
    if table.shape != shared:
        raise ArgumentError(
            f"{operator}: {name} must be {list(shared)} or {list(each)}, got {list(table.shape)}"
        )
    return table.expand(each)
