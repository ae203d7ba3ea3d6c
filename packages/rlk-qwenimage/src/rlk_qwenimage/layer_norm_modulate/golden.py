# SPDX-License-Identifier: Apache-2.0
"""Which bits are right: FP32 in the written order, each operation rounded once."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from rlk.launch import start_golden
from rlk.math.golden import divide, sqrt
from rlk.reduce import exact_sum
from rlk.reduce.row_sum.golden import row_dot, row_sum

# 2^16: columns of sums at a time, whose exact state of 6.5 MiB stays in caches.
SUMS = 1 << 16


def row_mean(total: torch.Tensor, columns: int) -> torch.Tensor:
    """total / N of row sums."""
    return divide(total, torch.full_like(total, columns))


def statistics(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean [R], rstd [R]) of FP32 rows [R, N]."""
    columns = x.shape[1]
    mean = row_mean(row_sum(x), columns)
    centred = x - mean[:, None]
    variance = row_mean(row_dot(centred, centred), columns)
    root = sqrt(variance + torch.full_like(variance, eps))
    return mean, divide(torch.ones_like(root), root)


def normalise(x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """xhat = (x - mean) * rstd of FP32 rows."""
    return (x - mean[..., None]) * rstd[..., None]


def factor(scale: torch.Tensor) -> torch.Tensor:
    """1 + scale in FP32, for all tokens of a sample: [T, 1, N]."""
    return (1.0 + scale.float())[:, None]


def modulate(xhat: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """xhat * (1 + scale) + shift, both steps rounded."""
    return xhat * factor(scale) + shift.float()[:, None]


def input_gradient(g: torch.Tensor, xhat: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """dx of FP32 rows [R, N].

    dx = rstd * ((g - m1) - xhat * m2), m1 = sum(g) / N, m2 = dot(g, xhat) / N
    """
    columns = g.shape[1]
    m1, m2 = row_mean(row_sum(g), columns), row_mean(row_dot(g, xhat), columns)
    return rstd[:, None] * ((g - m1[:, None]) - xhat * m2[:, None])


def token_sums(
    terms: torch.Tensor, dtype: torch.dtype, sums: torch.Tensor | None = None
) -> torch.Tensor:
    """[T, N] of dtype: the exact sums over tokens of FP32 terms [T, S, N], each rounded once.

    They are written to `sums` if there is memory for them.
    """
    if sums is None:
        sums = torch.empty_like(terms[:, 0], dtype=dtype, memory_format=torch.contiguous_format)
    group = max(1, SUMS // terms.shape[2])
    # Written in place: autocast refuses to concatenate some dtypes.
    for part, out in zip(terms.split(group), sums.split(group), strict=True):
        out.copy_(exact_sum.round(token_state(part), dtype, backend="golden").view_as(out))
    return sums


def token_state(terms: torch.Tensor) -> torch.Tensor:
    """[13, T * N]: the exact states of the sums over tokens of FP32 terms [T, S, N]."""
    columns = terms.movedim(1, 0).flatten(1)  # [S, T * N]
    empty = exact_sum.new(columns.shape[1], terms.device)
    return exact_sum.add_rows(empty, columns, backend="golden")


def token_states(
    dout: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    needs: frozenset[str],
) -> list[torch.Tensor]:
    """The exact states [13, T * N] of dscale and of dshift, those that are needed."""
    start_golden("layer_norm_modulate_token_states", __file__)
    upstream, states = dout.float(), []
    if "scale" in needs:
        states.append(token_state(upstream * normalise(x.float(), mean, rstd)))
    if "shift" in needs:
        states.append(token_state(upstream))
    return states


def forward(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out [T, S, N], mean [T, S], rstd [T, S])"""
    start_golden("layer_norm_modulate_forward", __file__)
    rows = x.float()
    mean, rstd = (s.view(x.shape[:2]) for s in statistics(rows.flatten(0, 1), eps))
    out = modulate(normalise(rows, mean, rstd), scale, shift)
    return out.to(x.dtype), mean, rstd


def backward(
    dout: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    *,
    eps: float,
    needs: frozenset[str],
    into: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(dx [T, S, N], dscale [T, N], dshift [T, N]); `into` is memory for the sums by name."""
    start_golden("layer_norm_modulate_backward", __file__)
    upstream, xhat = dout.float(), normalise(x.float(), mean, rstd)
    dx = dscale = dshift = None
    if "x" in needs:
        g = (upstream * factor(scale)).flatten(0, 1)
        dx = input_gradient(g, xhat.flatten(0, 1), rstd.flatten()).view(x.shape).to(x.dtype)
    if "scale" in needs:
        dscale = token_sums(upstream * xhat, scale.dtype, into.get("scale"))
    if "shift" in needs:
        dshift = token_sums(upstream, shift.dtype, into.get("shift"))
    return dx, dscale, dshift
