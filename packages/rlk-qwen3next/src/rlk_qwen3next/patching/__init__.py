# SPDX-License-Identifier: Apache-2.0
"""Our norms in a model of transformers, and theirs again.

A site keeps its module and changes its class, to one derived from its own whose `forward` calls
our operator. So the parameters, the state, hooks and everything that holds the module stay.
"""

from torch import nn

from rlk.errors import ArgumentError
from rlk.patching import PatchReport

from .report import PatchSite

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
    return _exchange("patch", model, to_ours=True)


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
    return _exchange("unpatch", model, to_ours=False)


def _exchange(name: str, model: nn.Module, to_ours: bool) -> PatchReport[PatchSite]:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"{name}: model must be a torch.nn.Module, got {type(model).__name__}")
    # Here, as it looks for transformers.
    from .sites import change, find_sites, obstacle, replacements

    pairs = replacements(name)
    sites = find_sites(model, pairs)
    if not any(pair for _, _, pair in sites):
        raise ArgumentError(
            f"{name}: model must hold a norm of Qwen3-Next, got {type(model).__name__} without one"
        )
    reasons = [obstacle(module, pair, to_ours) for _, module, pair in sites]
    described = [PatchSite.of(*site, r) for site, r in zip(sites, reasons, strict=True)]
    # Nothing above changes a model: an error leaves it whole.
    for (_, module, pair), reason in zip(sites, reasons, strict=True):
        if pair is not None and reason is None:
            change(module, pair, to_ours)
    return PatchReport.of(name, described)
