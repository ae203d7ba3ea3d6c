# SPDX-License-Identifier: Apache-2.0
"""Where a Qwen-Image transformer normalises, modulates and rotates, and what it reads there."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.models.normalization import AdaLayerNormContinuous, RMSNorm
from diffusers.models.transformers import transformer_qwenimage
from replay import Recorded, Replay, Results
from torch import nn

# In the order in which a block calls them.
NORMS = ("img_norm1", "txt_norm1", "img_norm2", "txt_norm2")
ROTATED = ("img query", "img key", "txt query", "txt key")


@dataclass
class Site:
    """A call of the model, patched or not: `call` looks up the code when it is made."""

    path: str
    kind: str
    names: tuple[str, ...]  # of what it reads
    call: Callable[..., torch.Tensor]
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    recorded: Recorded = field(default_factory=Recorded)

    def run(self, inputs: list[torch.Tensor], dy: torch.Tensor) -> Results:
        """Output and gradients of one call."""
        leaves = [x.detach().requires_grad_() for x in inputs]
        y = self.call(*leaves)
        gradients = torch.autograd.grad(y, [*leaves, *self.parameters.values()], dy)
        names = [f"d{name}" for name in (*self.names, *self.parameters)]
        return {"y": y.detach(), **dict(zip(names, gradients, strict=True))}

    def replay(self) -> Replay:
        """As it is now. Samples sum to a weight of a product in the order they come."""
        parameters = tuple(f"d{name}" for name in self.parameters)
        ordered = ("dweight",) if self.kind in ("modulation", "output norm") else ()
        return Replay(self.run, parameters, ordered)

    def keep(self, inputs: list[torch.Tensor], y: torch.Tensor) -> None:
        """Record one call, and the gradient of its result when it comes."""
        self.recorded.inputs = [x.detach().clone() for x in inputs]
        y.register_hook(lambda dy: setattr(self.recorded, "dy", dy.clone()))


def find(model: nn.Module) -> dict[tuple[str, str], Site]:
    """Every site of a model by the path of its module and, within it, the call."""
    sites: dict[tuple[str, str], Site] = {}
    for path, module in model.named_modules():
        if isinstance(module, transformer_qwenimage.QwenImageTransformerBlock):
            for name in ("img_mod", "txt_mod"):
                layer = getattr(module, name)
                site = Site(f"{path}.{name}", "modulation", ("temb",), layer, dict(named(layer[1])))
                sites[f"{path}.{name}", ""] = site
            for name in NORMS:
                call = modulated(module, name)
                sites[path, name] = Site(f"{path}.{name}", "modulated norm", ("x", "mod"), call)
            for name in ROTATED:
                sites[path, name] = Site(f"{path}.attn {name}", "rotation", ("x",), nn.Identity())
        elif isinstance(module, AdaLayerNormContinuous):
            site = Site(path, "output norm", ("x", "temb"), module, dict(named(module.linear)))
            sites[path, ""] = site
        elif isinstance(module, RMSNorm):
            sites[path, ""] = Site(path, "RMS norm", ("x",), module, dict(named(module)))
    return sites


def reached(sites: dict[tuple[str, str], Site]) -> dict[tuple[str, str], Site]:
    """Those that got a gradient: the last block's second norm of the text goes nowhere."""
    return {key: site for key, site in sites.items() if site.recorded.dy is not None}


def named(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The module's own parameters."""
    return module.named_parameters(recurse=False)


def modulated(block: nn.Module, name: str) -> Callable[..., torch.Tensor]:
    """x normalised and modulated by mod, as the block does it."""
    return lambda x, mod: block._modulate(getattr(block, name)(x), mod)[0]


def rotated(attention: nn.Module, table: torch.Tensor) -> Callable[..., torch.Tensor]:
    """x turned by what the code of the attention calls for it."""

    def call(x: torch.Tensor) -> torch.Tensor:
        scope = type(attention.processor).__call__.__globals__
        return scope["apply_rotary_emb_qwen"](x, table.to(x.device), use_real=False)

    return call


@contextmanager
def recording(model: nn.Module, sites: dict[tuple[str, str], Site]) -> Iterator[None]:
    """Within it, the sites of an unpatched model keep what they read and what they get."""
    with ExitStack() as undo:
        for (path, name), site in sites.items():
            if not name:
                module = model.get_submodule(path)
                handle = module.register_forward_hook(lambda m, x, y, s=site: s.keep(list(x), y))
                undo.callback(handle.remove)
        for path in dict.fromkeys(path for path, name in sites if name):
            undo.enter_context(_recording_block(model.get_submodule(path), path, sites))
        yield


@contextmanager
def _recording_block(block: Any, path: str, sites: dict[tuple[str, str], Site]) -> Iterator[None]:
    read: list[tuple[str, torch.Tensor]] = []
    turned = iter(ROTATED)
    modulate, rotate = block._modulate, transformer_qwenimage.apply_rotary_emb_qwen

    def kept_modulate(normed: torch.Tensor, mod: torch.Tensor, *rest: Any) -> Any:
        out, gate = modulate(normed, mod, *rest)
        name, x = read[-1]
        sites[path, name].keep([x, mod], out)
        return out, gate

    def kept_rotate(x: torch.Tensor, table: torch.Tensor, **options: Any) -> torch.Tensor:
        y = rotate(x, table, **options)
        site = sites[path, next(turned)]
        site.call = rotated(block.attn, table)
        site.keep([x], y)
        return y

    def within(module: Any, arguments: Any, result: Any = None) -> None:
        entering = result is None
        transformer_qwenimage.apply_rotary_emb_qwen = kept_rotate if entering else rotate

    handles = [
        getattr(block, name).register_forward_hook(lambda m, x, y, n=name: read.append((n, x[0])))
        for name in NORMS
    ]
    # The attention finds its rotation in the module of its class, which all blocks share.
    pre = block.register_forward_pre_hook(within)
    handles += [pre, block.register_forward_hook(within)]
    block._modulate = kept_modulate
    try:
        yield
    finally:
        del block._modulate
        transformer_qwenimage.apply_rotary_emb_qwen = rotate
        for handle in handles:
            handle.remove()
