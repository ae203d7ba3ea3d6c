# SPDX-License-Identifier: Apache-2.0
"""One backend of the two operators behind each other: their bits, by their own code."""

from typing import Any

import torch

from rlk.between import show


class Composition:
    """`forward` and `backward` of a backend, made of those of the projection and of the norm."""

    def __init__(self, projection: Any, norm: Any) -> None:
        self.projection = projection
        self.norm = norm

    def forward(
        self,
        x: torch.Tensor,
        temb: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        *,
        eps: float,
    ) -> tuple[torch.Tensor, ...]:
        """(out [T, S, H], act [T, K], mod [T, 2 H], mean [T, S], rstd [T, S])"""
        mod, act = self.projection.forward(temb, weight, bias)
        scale, shift = mod.chunk(2, 1)
        out, mean, rstd = self.norm.forward(x, scale, shift, eps=eps)
        return out, act, mod, mean, rstd

    def backward(
        self,
        dout: torch.Tensor,
        x: torch.Tensor,
        temb: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        act: torch.Tensor,
        mod: torch.Tensor,
        mean: torch.Tensor,
        rstd: torch.Tensor,
        *,
        eps: float,
        needs: frozenset[str],
        initial: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        """(dx [T, S, H], dtemb [T, K], dweight [2 H, K], exact state of dbias [13, 2 H])"""
        behind = needs - {"x"}
        wanted = (needs & {"x"}) | (frozenset({"scale", "shift"}) if behind else frozenset())
        scale, shift = mod.chunk(2, 1)
        dx, *sums = self.norm.backward(dout, x, scale, shift, mean, rstd, eps=eps, needs=wanted)
        if not behind:
            return dx, None, None, None
        # The one gradient of mod, rounded to its dtype, that all others come from. Not made by
        # torch.cat, which under autocast has dtypes of its own.
        dmod = torch.empty_like(mod, memory_format=torch.contiguous_format)
        for half in dmod.chunk(2, 1):
            # Nothing holds dscale or dshift any longer when the projection allocates its gradients.
            half.copy_(sums.pop(0))
        show("dmod", dmod)
        # Where a chain goes on: other backends of the projection need not know it.
        more = {} if initial is None else {"initial": initial}
        return dx, *self.projection.backward(dmod, temb, weight, bias, act, needs=behind, **more)
