# SPDX-License-Identifier: Apache-2.0
"""Batches of timestep embeddings on a GPU, for the tests of modulations there."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rlk.test_support.on_gpu import DEVICE, assert_equal_bits
from rlk_qwenimage.adaln_mod_projection.operator import OPERATOR

BACKENDS = ("triton", "cuda")
DTYPES = ("bfloat16", "float32")
SEEDS = (0, 127, 2026)
# Columns of mod by stream; the image and the text stream have weights of their own.
STREAMS = {"img": 18432, "txt": 18432, "final": 6144}
K = 3072
RESULTS = ("mod", "act", "dtemb", "dweight", "dbias")
# Whose bits a sample keeps in any batch.
OF_SAMPLES = ("mod", "act", "dtemb")
OF_PARAMETERS = ("dweight", "dbias")


@dataclass(frozen=True)
class Batch:
    """Tensors of one call: temb [T, K], weight [N, K], bias [N], dmod [T, N]."""

    temb: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    dmod: torch.Tensor

    def part(self, rows: slice) -> "Batch":
        """The same call on some samples."""
        return Batch(self.temb[rows], self.weight, self.bias, self.dmod[rows])


def batch(stream: str, dtype: str, samples: int, seed: int = 0) -> Batch:
    """Random values made on the GPU, at the scale of a trained model."""
    place = list(STREAMS).index(stream)
    generator = torch.Generator(DEVICE).manual_seed(seed * 10 + place)
    columns = STREAMS[stream]

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        made = torch.randn(*shape, generator=generator, device=DEVICE)
        return made.mul_(scale).to(getattr(torch, dtype))

    weight = normal(columns, K, scale=K**-0.5)
    return Batch(normal(samples, K), weight, normal(columns), normal(samples, columns))


def run(
    made: Batch, backend: str, wanted: tuple[str, ...] = ("temb", "weight", "bias")
) -> dict[str, torch.Tensor]:
    """mod, act and the wanted gradients of the operators of torch, dbias rounded."""
    forward, backward = (
        getattr(torch.ops.rlk, name) for name in (OPERATOR.name, f"{OPERATOR.name}_backward")
    )
    with torch.no_grad():
        mod, act = forward(made.temb, made.weight, made.bias, backend)
        needs = [name in wanted for name in ("temb", "weight", "bias")]
        tensors = (made.dmod, made.temb, made.weight, made.bias, act)
        dtemb, dweight, state = backward(*tensors, *needs, backend)
        found = {"mod": mod, "act": act, "dtemb": dtemb, "dweight": dweight}
        if "bias" in wanted:
            found["dbias"] = torch.ops.rlk.exact_sum_round(state, made.bias.dtype, backend)
    return {name: t for name, t in found.items() if t.numel() or name in OF_SAMPLES[:2]}


def require_all(
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    names: tuple[str, ...],
    what: str,
) -> None:
    """Assert equal bits of some of the results by name."""
    for name in names:
        assert_equal_bits(actual[name], expected[name], f"{name} of {what}")
