# SPDX-License-Identifier: Apache-2.0
"""One backend of the two operators behind each other: their bits, by their own code."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from rlk.between import show
from rlk.reduce.exact_sum.form import SumForm


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
        forms: Mapping[str, SumForm] = MappingProxyType({}),
        initial: torch.Tensor | None = None,
    ) -> tuple[Any, ...]:
        """(dx [T, S, H], dtemb [T, K], dweight [2 H, K], exact state of dbias [13, 2 H])

        `forms` of dbias are those of the projection, if it finishes sums.
        """
        behind, rows = needs - {"x"}, needs & {"x"}
        scale, shift = mod.chunk(2, 1)
        read = dout, x, scale, shift, mean, rstd
        if not behind:
            return self.norm.backward(*read, eps=eps, needs=rows)[0], None, None, None
        dscale, dshift = sums = torch.empty((2, *scale.shape), dtype=mod.dtype, device=mod.device)
        into = {"scale": dscale, "shift": dshift}
        dx = self.norm.backward(*read, eps=eps, needs=rows | into.keys(), into=into)[0]
        # The one gradient of mod, rounded to its dtype, that all others come from. Of one sample it
        # is where the sums are already. Not made by torch.cat, which under autocast has dtypes of
        # its own.
        dmod = sums.transpose(0, 1).reshape(mod.shape)
        # Of several samples it is a copy: free the sums before the projection allocates.
        del dscale, dshift, sums, into
        show("dmod", dmod)
        # Where a chain goes on and how sums end: other backends of the projection need not know it.
        more: dict[str, Any] = {} if initial is None else {"initial": initial}
        if forms:
            more["forms"] = forms
        return dx, *self.projection.backward(dmod, temb, weight, bias, act, needs=behind, **more)
