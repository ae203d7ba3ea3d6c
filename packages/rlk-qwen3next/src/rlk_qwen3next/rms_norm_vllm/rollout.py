# SPDX-License-Identifier: Apache-2.0
"""vLLM's compiled kernels: digests recorded of them, their inputs, and the kernels themselves."""

import json
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from rlk.gates.engines import Engine, EngineCall, Recorded

# Digests up to N = 2048: of longer rows the engine's own bits depend on the number of rows.
_DOCUMENT = json.loads(Path(__file__).with_name("rollout_hashes.json").read_text())
_VERSION = "0.33.0"
_EPS = 1e-6


def uniform(rows: int, columns: int, seed: int, scale: float, offset: float = 0.0) -> torch.Tensor:
    """[rows, columns] BF16 in offset +- scale, by a hash of (seed, index) in whole numbers."""
    index = torch.arange(rows * columns, dtype=torch.int64) + seed * 1_000_003
    bits = (index * 2_654_435_761) % 2**32
    bits = (bits ^ (bits >> 15)) * 2_246_822_519 % 2**32
    bits = bits ^ (bits >> 13)
    value = bits.double() / 2**31 - 1.0
    return (value * scale + offset).reshape(rows, columns).to(torch.bfloat16)


def tensors(sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """x and residual [T, N] and weight [N] of one recorded case."""
    rows, columns = sizes["T"], sizes["N"]
    return {
        "x": uniform(rows, columns, 1, 3.0),
        "weight": uniform(1, columns, 2, 0.5, 1.0)[0],
        "residual": uniform(rows, columns, 3, 2.0),
    }


def recorded(keys: Mapping[str, str]) -> tuple[Recorded, ...]:
    """What is recorded under these keys, by the names of our outputs."""
    return tuple(
        Recorded(
            {"T": case["rows"], "N": case["cols"]},
            {name: case[key] for name, key in keys.items()},
        )
        for case in _DOCUMENT["cases"]
    )


def load(call: Any) -> tuple[str, EngineCall]:
    """The installed version, and `call` with the module of its kernels.

    Raises:
        ImportError: vLLM is not installed.
    """
    from vllm import _custom_ops as kernels

    return version("vllm"), partial(call, kernels)


def _rms_norm(kernels: Any, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = torch.empty_like(x)
    kernels.rms_norm(y, x, weight, _EPS)
    return (y,)


ENGINE = Engine(
    name="vLLM",
    version=_VERSION,
    dtype="bfloat16",
    recorded=recorded({"y": "rms_norm"}),
    inputs=lambda sizes: [tensors(sizes)[name] for name in ("x", "weight")],
    load=partial(load, _rms_norm),
)
