# SPDX-License-Identifier: Apache-2.0
"""Where a transformer of Qwen-Image has something that an operator of ours computes."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import nn

from rlk import registry
from rlk.patching import own_class, require_release

from .parts import Part, Site, kind

# The oldest release and the newest series of diffusers that the tests cover, both included.
OLDEST_DIFFUSERS = "0.35.0"
NEWEST_DIFFUSERS = "0.42"

NORMS = ("img_norm1", "img_norm2", "txt_norm1", "txt_norm2")
# Operators of other packages, and what brings them.
PACKAGES = {"multi_axis_rope": "rlk-rope", "rms_norm": "rlk-qwen3next"}


def require_diffusers(name: str) -> None:
    """Refuse to go on without a diffusers of the supported range.

    Raises:
        PlatformError: diffusers is missing or outside it.
    """
    require_release(name, "diffusers", OLDEST_DIFFUSERS, NEWEST_DIFFUSERS, "rlk-qwenimage")


def find_sites(model: nn.Module) -> list[Site]:
    """Every site of the model, each once, and the norms without replacement beside them.

    Empty without a block or an output norm of Qwen-Image.
    """
    from . import diffusers_blocks as ours

    sites: list[Site] = []
    inner: set[nn.Module] = set()  # norms that belong to another site
    for path, module in model.named_modules():
        if isinstance(module, ours.theirs.QwenImageTransformerBlock):
            sites += _block(path, module)
            inner |= {getattr(module, name) for name in NORMS}
        elif isinstance(module, ours.TheirAdaLayerNormContinuous):
            sites.append(_output_norm(path, module))
            inner.add(module.norm)
        elif module not in inner and type(module).__name__.endswith("Norm"):
            sites.append(_other_norm(path, module))
    qwen_image = (ours.theirs.QwenImageTransformerBlock, ours.TheirAdaLayerNormContinuous)
    return sites if any(isinstance(site.module, qwen_image) for site in sites) else []


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _block(path: str, block: Any) -> Iterator[Site]:
    from . import diffusers_blocks as ours

    for name in ("img_mod", "txt_mod"):
        yield _modulation(_below(path, name), getattr(block, name))
    norms = tuple(Part(name, getattr(block, name), nn.LayerNorm, ours.LayerNorm) for name in NORMS)
    itself = Part("", block, ours.theirs.QwenImageTransformerBlock, ours.QwenImageTransformerBlock)
    eps = getattr(block.img_norm1, "eps", None)
    yield Site(
        path, block, "layer_norm_modulate", eps, (itself, *norms), lambda: _unfit_block(block)
    )
    yield _rotation(_below(path, "attn.processor"), block.attn.processor)


def _modulation(path: str, module: Any) -> Site:
    from . import diffusers_blocks as ours

    operator = "adaln_mod_projection"
    if not isinstance(module, nn.Sequential) or len(module) != 2:
        return Site(path, module, operator, unfit=lambda: "it is not a SiLU and a Linear")
    # An adapter put around the patched layer holds it.
    layers = module[1].modules()
    linear = next((layer for layer in layers if isinstance(layer, ours.Linear)), module[1])
    parts = (
        Part("", module, nn.Sequential, ours.Sequential),
        Part("its projection", linear, nn.Linear, ours.Linear),
    )
    return Site(
        path, module, operator, parts=parts, unfit=lambda: _unfit_projection(module[0], linear)
    )


def _output_norm(path: str, module: Any) -> Site:
    from . import diffusers_blocks as ours

    part = Part("", module, ours.TheirAdaLayerNormContinuous, ours.AdaLayerNormContinuous)
    eps = getattr(module.norm, "eps", None)

    def unfit() -> str:
        return _unfit_norm("its norm", module.norm) or _unfit_projection(module.silu, module.linear)

    return Site(path, module, "final_adaln_out", eps, (part,), unfit)


def _rotation(path: str, processor: Any) -> Site:
    ours = _beside("multi_axis_rope")
    if ours is None:
        return _not_installed(path, processor, "multi_axis_rope")
    name = "QwenDoubleStreamAttnProcessor2_0"
    part = Part("", processor, getattr(ours.theirs, name), getattr(ours, name))
    unfit = "" if ours.IS_CALLED else "its code rotates in another way"
    return Site(path, processor, "multi_axis_rope", parts=(part,), unfit=lambda: unfit)


def _other_norm(path: str, module: Any) -> Site:
    from diffusers.models.normalization import RMSNorm

    if not isinstance(module, RMSNorm):
        where = type(module).__module__
        return Site(path, module, unfit=lambda: f"there is no operator for a class of {where}")
    ours = _beside("rms_norm")
    if ours is None:
        return _not_installed(path, module, "rms_norm")
    part = Part("", module, RMSNorm, ours.RMSNorm)
    return Site(path, module, "rms_norm", module.eps, (part,), lambda: _unfit_rms_norm(module))


def _beside(operator: str) -> ModuleType | None:
    """The classes that call an operator of another package, where that is installed."""
    if operator not in registry.operators():
        return None
    if operator == "rms_norm":
        from . import diffusers_norms

        return diffusers_norms
    from . import diffusers_rope

    return diffusers_rope


def _not_installed(path: str, module: Any, operator: str) -> Site:
    missing = f"{operator} is not installed; install {PACKAGES[operator]}"
    return Site(path, module, operator, unfit=lambda: missing)


def _unfit_block(block: Any) -> str:
    if getattr(block, "zero_cond_t", False):
        return "its modulation differs from token to token (zero_cond_t)"
    norms = {name: getattr(block, name) for name in NORMS}
    if len({norm.eps for norm in norms.values()}) > 1:
        return "its norms differ in eps"
    return next(filter(None, (_unfit_norm(name, norm) for name, norm in norms.items())), "")


def _unfit_norm(name: str, norm: Any) -> str:
    if not isinstance(norm, nn.LayerNorm):
        return f"{name} is {kind(norm)}, not LayerNorm"
    if norm.weight is not None:
        return f"{name} has a weight"
    return "" if len(norm.normalized_shape) == 1 else f"{name} is over several axes"


def _unfit_projection(activation: Any, linear: Any) -> str:
    from . import diffusers_blocks as ours

    if type(activation) is not nn.SiLU:
        return f"its activation is {kind(activation)}, not SiLU"
    if own_class(linear) not in (nn.Linear, ours.Linear):
        return f"its projection is {kind(linear)}, not Linear"
    return "" if linear.bias is not None else "its projection has no bias"


def _unfit_rms_norm(norm: Any) -> str:
    if norm.weight is None:
        return "it has no weight"
    return "" if norm.bias is None else "it has a bias"
