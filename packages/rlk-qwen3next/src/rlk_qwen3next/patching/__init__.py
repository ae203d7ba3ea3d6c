# SPDX-License-Identifier: Apache-2.0
"""Our norms in a model of transformers, and theirs again.

A site keeps its module and changes its class, to one derived from its own whose `forward` calls
our operator. So the parameters, the state, hooks and everything that holds the module stay.
"""

from typing import TYPE_CHECKING

from torch import nn

from rlk.patching import PatchReport, exchange

from .report import PatchSite

if TYPE_CHECKING:
    from .sites import Site

__all__ = ["PatchReport", "PatchSite", "patch", "unpatch"]


def patch(model: nn.Module) -> PatchReport[PatchSite]:
    """Let every norm of a Qwen3-Next model compute with our operators.

    eps, activation and offset are those of each module. Patching twice changes nothing. On a
    model on GPUs, forward and backward then have bits that ignore the batch; `unpatch` undoes it.

    Args:
        model: a Qwen3-Next model of transformers, or any module that holds its norms.
    Returns:
        report: the sites changed, and the norms left alone with the reason; prints as a table.
    Raises:
        ArgumentError: model is no module or holds no norm of Qwen3-Next.
        PlatformError: transformers is missing or outside the supported range.
    """
    return _exchange("patch", model)


def unpatch(model: nn.Module) -> PatchReport[PatchSite]:
    """Give every norm that `patch` changed its own class, and so its own bits, again.

    Args:
        model: what `patch` got, or a copy of it.
    Returns:
        report: as from `patch`.
    Raises:
        ArgumentError: model is no module or holds no norm of Qwen3-Next.
        PlatformError: transformers is missing or outside the supported range.
    """
    return _exchange("unpatch", model)


def _exchange(name: str, model: nn.Module) -> PatchReport[PatchSite]:
    def find(model: nn.Module) -> "list[Site]":
        # Here, as it looks for transformers.
        from .sites import find_sites, replacements

        return find_sites(model, replacements(name))

    return exchange(name, model, find, "a norm of Qwen3-Next")
