# SPDX-License-Identifier: Apache-2.0
"""Our operators in a Qwen-Image transformer of diffusers, and its own code again.

A site keeps its modules and changes their classes, to ones derived from their own that call our
operators. So the parameters, the state, hooks and everything that holds the modules stay.
"""

from typing import TYPE_CHECKING

from torch import nn

from rlk.patching import PatchReport, exchange

from .report import PatchSite

if TYPE_CHECKING:
    from .parts import Site

__all__ = ["PatchReport", "PatchSite", "patch", "unpatch"]


def patch(model: nn.Module) -> PatchReport[PatchSite]:
    """Let the modulations, the norms and the rotation of a Qwen-Image transformer be ours.

    eps is that of each module. RMS norms and rotary embeddings change where the packages that
    have their operators are installed. Patching twice changes nothing; `unpatch` undoes it.

    Args:
        model: a `QwenImageTransformer2DModel` of diffusers, or any module that holds its parts.
    Returns:
        report: the sites changed, and those left alone with the reason; prints as a table.
    Raises:
        ArgumentError: model is no module or holds no part of Qwen-Image.
        PlatformError: diffusers is missing or outside the supported range.
    """
    return _exchange("patch", model)


def unpatch(model: nn.Module) -> PatchReport[PatchSite]:
    """Give every module that `patch` changed its own class, and so its own bits, again.

    Args:
        model: what `patch` got, or a copy of it.
    Returns:
        report: as from `patch`.
    Raises:
        ArgumentError: model is no module or holds no part of Qwen-Image.
        PlatformError: diffusers is missing or outside the supported range.
    """
    return _exchange("unpatch", model)


def _exchange(name: str, model: nn.Module) -> PatchReport[PatchSite]:
    def find(model: nn.Module) -> "list[Site]":
        # Here, as it looks for diffusers.
        from .sites import find_sites, require_diffusers

        require_diffusers(name)
        return find_sites(model)

    return exchange(name, model, find, "a part of Qwen-Image")
