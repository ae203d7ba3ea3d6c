# SPDX-License-Identifier: Apache-2.0
"""Products that are easily wrong, with answers worked out by hand, and layouts of operands."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

_FP32, _BF16 = torch.float32, torch.bfloat16
_INF, _NAN = math.inf, math.nan
# 2^24: the first integer beside which FP32 cannot hold an odd one.
_BIG = 2.0**24
# A tie of TF32 at the end of FP32's range.
_LARGE = (2 - 2.0**-11) * 2.0**127


@dataclass(frozen=True)
class Case:
    """One element: products at some places of K, what is added, and the result of any backend."""

    name: str
    products: Mapping[int, tuple[float, float]]
    k: int
    expected: float
    bias: float | None = None
    initial: float | None = None
    dtype: torch.dtype = _BF16
    result: torch.dtype = _FP32

    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """a [1, K] and b [1, K]."""
        a, b = torch.zeros(2, 1, self.k, dtype=self.dtype)
        for place, (left, right) in self.products.items():
            a[0, place], b[0, place] = left, right
        return a, b

    def added(self) -> dict[str, torch.Tensor | None]:
        """The arguments bias and initial."""
        return {
            "bias": None if self.bias is None else torch.tensor([self.bias]),
            "initial": None if self.initial is None else torch.tensor([[self.initial]]),
        }


_ORDER = (
    # In any other order, or in two chains, the one survives.
    Case("big_one_minus_big", {0: (_BIG, 1), 16: (1, 1), 32: (-_BIG, 1)}, 48, 0.0),
    Case("big_minus_big_one", {0: (_BIG, 1), 16: (-_BIG, 1), 32: (1, 1)}, 48, 1.0),
    Case("big_last", {0: (1, 1), 3000: (_BIG, 1), 3071: (-_BIG, 1)}, 3072, 0.0),
    Case("initial_is_first", {0: (1, 1), 16: (-_BIG, 1)}, 32, 0.0, initial=_BIG),
    Case("bias_is_last", {0: (1, 1), 16: (1, 1)}, 32, _BIG + 2, bias=_BIG),
    Case("bias_is_last_one_step", {0: (1, 1), 1: (1, 1)}, 16, _BIG + 2, bias=_BIG),
    # 257 is a tie of BF16.
    Case("one_rounding", {0: (1, 257)}, 1, 258.0, bias=1.0, dtype=torch.float16, result=_FP32),
    Case("one_rounding_narrow", {0: (1, 256), 1: (1, 1)}, 2, 258.0, bias=1.0, result=_BF16),
)
_BLOCKS = (
    # A block of 32 comes to two before it is added: step by step both ones would vanish.
    Case(
        "block_whole", {0: (_BIG, 1), 32: (1, 1), 63: (1, 1), 64: (-_BIG, 1)}, 96, 2.0, dtype=_FP32
    ),
    Case(
        "block_of_one", {0: (_BIG, 1), 32: (1, 1), 64: (1, 1), 96: (-_BIG, 1)}, 97, 0.0, dtype=_FP32
    ),
    Case("block_initial", {0: (1, 1), 31: (1, 1), 32: (-_BIG, 1)}, 64, 2.0, None, _BIG, _FP32),
    # 2^24 + 3 is a tie, to the even 2^24 + 4; a tensor core would truncate it to 2^24 + 2.
    Case("block_to_nearest", {0: (_BIG, 1), 32: (3, 1), 64: (-_BIG, 1)}, 96, 4.0, dtype=_FP32),
)
_ZEROS = (
    Case("no_products", {}, 0, 0.0),
    Case("no_products_initial", {}, 0, 3.0, initial=3.0),
    Case("negative_zero_initial", {}, 8, 0.0, initial=-0.0),
    Case("negative_zero_no_products", {}, 0, 0.0, initial=-0.0),
    Case("negative_zero_products", dict.fromkeys(range(8), (-0.0, 1.0)), 8, 0.0),
    Case("negative_zero_bias", {}, 8, 0.0, bias=-0.0),
)
_SPECIAL = (
    Case("nan", {5: (_NAN, 0.0)}, 32, _NAN),
    Case("infinity", {5: (_INF, 2.0), 20: (1.0, -1.0)}, 32, _INF),
    Case("infinity_times_zero", {5: (_INF, 0.0)}, 32, _NAN),
    Case("infinities_of_both_signs", {0: (_INF, 1.0), 1: (-_INF, 1.0)}, 16, _NAN),
    Case("float32_infinity", {5: (_INF, 2.0), 20: (1.0, -1.0)}, 32, _INF, dtype=_FP32),
    Case("float32_nan", {5: (_NAN, 1.0)}, 32, _NAN, dtype=_FP32),
)
_TWO_PARTS = (
    # 1 + 2^-12 has 13 significant bits, two more than TF32.
    Case("low_part_of_a", {0: (1 + 2.0**-12, 1)}, 8, 1 + 2.0**-12, dtype=_FP32),
    Case("low_part_of_b", {0: (1, 1 + 2.0**-12)}, 8, 1 + 2.0**-12, dtype=_FP32),
    Case("all_bits", {0: (1 + 2.0**-11 + 2.0**-21, 4)}, 40, 4 + 2.0**-9 + 2.0**-19, dtype=_FP32),
    # RN(x) to TF32 would be Inf.
    Case("large", {0: (_LARGE, 0.5)}, 8, _LARGE / 2, dtype=_FP32),
    Case("negative_large", {0: (0.25, -_LARGE)}, 8, -_LARGE / 4, dtype=_FP32),
)
CASES = (*_ORDER, *_BLOCKS, *_ZEROS, *_SPECIAL, *_TWO_PARTS)


@dataclass(frozen=True)
class Integers:
    """Operands whose every partial sum is a small integer: exact in any order."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor
    initial: torch.Tensor

    def expected(
        self, bias: torch.Tensor | None = None, initial: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The product by integers, FP32."""
        c = (self.a.long()[:, None] * self.b.long()[None]).sum(2)
        c = c if bias is None else c + bias.long()
        c = c if initial is None else c + initial.long()
        return c.to(_FP32)


def integers(m: int, n: int, k: int, dtype: torch.dtype, seed: int = 0) -> Integers:
    """Operands of -4 to 4."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, generator=generator).to(dtype)

    return Integers(draw(m, k), draw(n, k), draw(n), draw(m, n).to(_FP32))


def _padded(t: torch.Tensor) -> torch.Tensor:
    """Rows 16 bytes apart: what TMA reads although K is no multiple of it."""
    return torch.nn.functional.pad(t, (0, -t.shape[1] % 8 + 8))[:, : t.shape[1]]


def _unaligned(t: torch.Tensor) -> torch.Tensor:
    memory = t.new_empty(t.numel() + 1)
    view = memory[1:].view(t.shape)
    return view.copy_(t)


def _every_second(t: torch.Tensor) -> torch.Tensor:
    wide = t.new_zeros(2 * t.shape[0], 2 * t.shape[1])
    wide[::2, ::2] = t
    return wide[::2, ::2]


# Copies of a tensor [rows, K] with the same elements at other strides.
LAYOUTS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k_major": lambda t: t.contiguous(),
    "row_major": lambda t: t.t().contiguous().t(),
    "k_major_padded": _padded,
    "row_major_padded": lambda t: _padded(t.t()).t(),
    "unaligned": _unaligned,
    "every_second": _every_second,
}
