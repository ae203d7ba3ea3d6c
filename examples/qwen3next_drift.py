# SPDX-License-Identifier: Apache-2.0
"""A prompt alone and in a padded batch: how far it drifts, and which modules are the cause."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlk.compare import raw_bits

README = Path(__file__).resolve().parents[1] / "README.md"


def text(start: int, length: int) -> torch.Tensor:
    """Bytes of the README, from its start again after its end, as token ids [1, length]."""
    content = README.read_bytes()
    return torch.tensor([content[i % len(content)] for i in range(start, start + length)])[None]


class Prompt:
    """One prompt, alone and as the first row of a batch that pads it on the right."""

    def __init__(self, model: nn.Module, length: int) -> None:
        self.length = length
        self.alone = text(0, length).to(model.device)
        others = [text(start, 2 * length) for start in (length, 3 * length)]
        padding = torch.zeros(1, length, dtype=torch.int64)
        self.batch = torch.cat([torch.cat([text(0, length), padding], 1), *others]).to(model.device)
        self.mask = torch.ones_like(self.batch)
        self.mask[0, length:] = 0

    def call(self, model: nn.Module, together: bool) -> torch.Tensor:
        """The prompt's log-probabilities [L - 1] of its own next tokens."""
        ids = self.batch if together else self.alone
        mask = self.mask if together else torch.ones_like(ids)
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        chosen = self.alone[0, 1:, None]
        return logits[0, : self.length - 1].float().log_softmax(-1).gather(-1, chosen)[:, 0]

    def rows(self, tensor: Any, together: bool) -> torch.Tensor | None:
        """The prompt's part of a tensor [L, ...], or None where tokens cannot be told apart."""
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            return None
        batch, width = (self.batch if together else self.alone).shape
        if tensor.dim() > 2 and tensor.shape[0] in (1, batch) and tensor.shape[1] == width:
            return tensor[0, : self.length]
        if tensor.dim() == 2 and tensor.shape[0] and tensor.shape[0] % (batch * width) == 0:
            return tensor.reshape(batch, width, -1, tensor.shape[-1])[0, : self.length]
        return None


def tensors_of(value: Any) -> list[Any]:
    """A module's arguments or results, flat."""
    return list(value) if isinstance(value, tuple | list) else [value]


class Origins:
    """Which modules drift on their own.

    The batch's values are recorded. The prompt alone then runs on them: whatever a module reads
    or returns is compared, counted where it differs, and replaced by the batch's. So each module
    reads the same bits in both runs, and what differs behind it, it caused. A difference in what
    a module reads was caused by the code of the module around it, and so was what a module did
    whose tokens cannot be told apart, as an expert that gets some of them.
    """

    def __init__(self, model: nn.Module, prompt: Prompt) -> None:
        self.model, self.prompt = model, prompt
        self.seen: dict[tuple[str, str], list[torch.Tensor | None]] = {}
        self.found: dict[str, str] = {}  # path of the module at fault -> its class
        self.compared: set[str] = set()

    def locate(self) -> "Origins":
        """Run both and keep what was found."""
        for together in (True, False):
            handles = [
                handle
                for path, module in self.model.named_modules()
                if path
                for handle in (
                    module.register_forward_pre_hook(self._reads(path, together), with_kwargs=True),
                    module.register_forward_hook(self._returns(path, together)),
                )
            ]
            self.prompt.call(self.model, together)
            for handle in handles:
                handle.remove()
        return self

    def _reads(self, path: str, together: bool) -> Callable[..., Any]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            values = self._visit((path, "reads"), [*arguments, *keywords.values()], together)
            cut = len(arguments)
            return tuple(values[:cut]), dict(zip(keywords, values[cut:], strict=True))

        return hook

    def _returns(self, path: str, together: bool) -> Callable[..., Any]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> Any:
            values = self._visit((path, "returns"), tensors_of(output), together)
            return tuple(values) if isinstance(output, tuple) else values[0]

        return hook

    def _visit(self, key: tuple[str, str], values: list[Any], together: bool) -> list[Any]:
        rows = [self.prompt.rows(value, together) for value in values]
        if together:
            self.seen[key] = [None if row is None else row.clone() for row in rows]
            return values
        result = []
        for value, row, wanted in zip(values, rows, self.seen.get(key, rows), strict=True):
            if row is not None and wanted is not None and row.shape == wanted.shape:
                path, side = key
                self.compared.add(path)
                if not torch.equal(raw_bits(row), raw_bits(wanted)):
                    at_fault = path if side == "returns" else path.rpartition(".")[0]
                    self.found.setdefault(
                        at_fault, type(self.model.get_submodule(at_fault)).__name__
                    )
                    value = wanted.reshape(value.shape)
            result.append(value)
        return result


def drift(model: nn.Module, prompt: Prompt) -> dict[str, Any]:
    """How far the prompt's log-probabilities move in company, and the modules that move them."""
    alone, together = (prompt.call(model, side) for side in (False, True))
    origins = Origins(model, prompt).locate()
    first = next(iter(origins.found.items()), None)
    at_fault = Counter(origins.found.values())
    compared = Counter(type(model.get_submodule(path)).__name__ for path in origins.compared)
    return {
        "tokens": alone.numel(),
        "tokens_differing": int((raw_bits(alone) != raw_bits(together)).sum()),
        "largest": float((alone - together).abs().max()),
        "first": f"{first[0] or 'model'} ({first[1]})" if first else "none",
        "modules": {name: [n, compared[name]] for name, n in at_fault.items()},
    }
