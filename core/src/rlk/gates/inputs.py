# SPDX-License-Identifier: Apache-2.0
"""Deterministic inputs for any declared operator, made from its declaration alone."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from rlk.operator import Operator, Tensor, Workload

# Four samples whose lengths share no factor with chunk sizes.
SAMPLE_LENGTHS = (11, 16, 13, 19)
# Upstream gradients are this much larger than the outputs' scale, so that the root mean square
# of every gradient stands well above the absolute tolerance of its judgment.
UPSTREAM_SCALE = 4.0
# 2^12 elements a row: what the interpreter of Triton computes soon, and the rows of models too.
SHORT_ELEMENTS = 1 << 12
# 2^14 elements a row: what the oracle judges soon, where many sizes are declared for gates.
JUDGED_ELEMENTS = 1 << 14

Values = Callable[[torch.Generator, tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class Fixture:
    """Inputs of one call: rows [T, ...] in canonical order, parameters, upstream gradients."""

    inputs: dict[str, torch.Tensor]
    upstream: dict[str, torch.Tensor]
    scalars: dict[str, Any]

    @property
    def rows(self) -> int:
        """T"""
        return next(iter(self.upstream.values())).shape[0]


def default_scalars(operator: Operator) -> dict[str, Any]:
    """Every scalar of the operator at its default."""
    return {s.name: s.default for s in operator.scalars}


def scalar_variants(operator: Operator) -> dict[str, dict[str, Any]]:
    """The default scalars and, one change at a time, every other value to be judged."""
    variants = {"default": default_scalars(operator)}
    for scalar in operator.free_scalars:
        for value in (*scalar.choices, *scalar.aliases, *scalar.also):
            if value != scalar.default:
                changed = {**default_scalars(operator), scalar.name: value}
                variants[f"{scalar.name}={value}"] = changed
    return variants


def smallest_sizes(operator: Operator) -> dict[str, int]:
    """Symbol values of the operator's smallest real workload, without the row count.

    Or those declared for gates, where golden or the interpreter takes too long at real ones.
    """
    return dict(operator.gate_sizes) or without_rows(smallest_workload(operator).sizes)


def smallest_workload(operator: Operator) -> Workload:
    """The real workload with the smallest rows."""
    return min(operator.workloads, key=lambda w: sorted(without_rows(w.sizes).values()))


def without_rows(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes of a row."""
    return {symbol: value for symbol, value in sizes.items() if symbol != "T"}


def real_sizes(operator: Operator) -> list[dict[str, int]]:
    """Sizes of the rows of models, each once and the smallest first.

    A row whose tokens are summed has the fewest: more of them are judged as rows of their own.
    """
    axis = operator.token_axis
    fewest = {axis: min(w.sizes[axis] for w in operator.workloads)} if axis else {}
    found = [smallest_sizes(operator)]
    for workload in operator.workloads:
        sizes = {**without_rows(workload.sizes), **fewest}
        if sizes not in found:
            found.append(sizes)
    return found


def row_elements(operator: Operator, sizes: Mapping[str, int]) -> int:
    """Elements of a row of the first input."""
    return prod(row_shape(operator.inputs[0], {**sizes, "T": 1}))


def edge_sizes(operator: Operator, lengths: Iterable[int]) -> list[dict[str, int]]:
    """Sizes off those of models: these lengths of a row, or what is declared where rows have axes.

    Rows of several axes have no length that would do for all; every real size belongs to theirs,
    unless sizes are declared for gates.
    """
    symbols = {s for t in operator.inputs for s in t.shape} - {"..."}
    if len(symbols) == 1:
        (symbol,) = symbols
        return [{symbol: length} for length in lengths]
    real = [] if operator.gate_sizes else real_sizes(operator)[1:]
    return real + _odd_sizes(operator, [smallest_sizes(operator), *real])


def _odd_sizes(operator: Operator, known: list[dict[str, int]]) -> list[dict[str, int]]:
    return [dict(sizes) for sizes in operator.odd_sizes if sizes not in known]


def judged_sizes(operator: Operator, tier: str) -> dict[str, dict[str, int]]:
    """Sizes to judge, by a prefix for their records: the smallest, and in full every real one.

    Or, where sizes are declared for gates, every odd one that is no larger than the oracle allows.
    """
    smallest = smallest_sizes(operator)
    found = {"": smallest}
    if tier == "full":
        odd = [
            sizes
            for sizes in _odd_sizes(operator, [smallest])
            if row_elements(operator, sizes) <= JUDGED_ELEMENTS
        ]
        others = odd if operator.gate_sizes else real_sizes(operator)[1:]
        found |= {f"{label(sizes)}_": sizes for sizes in others}
    return found


def label(sizes: Mapping[str, int]) -> str:
    """Sizes as records name them, such as N=128."""
    return "_".join(f"{symbol}={value}" for symbol, value in sizes.items())


def fixture(
    operator: Operator,
    dtype: str,
    *,
    rows: int,
    sizes: Mapping[str, int],
    seed: int,
    values: Values | None = None,
    scalars: Mapping[str, Any] | None = None,
    parameter_dtype: str | None = None,
) -> Fixture:
    """Random inputs whose values BF16 cannot hold before they are quantised to `dtype`.

    Args:
        operator: whose declaration is followed.
        dtype: of the first input; the others follow their declared rule.
        rows: T.
        sizes: value of every other shape symbol.
        seed: of the generator; each tensor has a stream of its own.
        values: fills inputs with row gradients, and upstream ones; all else is normal.
        scalars: the defaults unless given.
        parameter_dtype: of parameters, where the declaration allows it.
    """
    sizes = {**sizes, "T": rows}
    made: dict[str, torch.Tensor] = {}
    for position, declared in enumerate(operator.inputs):
        generator = torch.Generator().manual_seed(seed * 1009 + position)
        shape = row_shape(declared, sizes)
        if declared.is_parameter:
            tensor = _parameter(declared, generator, shape)
            other = parameter_dtype if parameter_dtype in declared.dtype else None
            made[declared.name] = tensor.to(_dtype(declared, made, dtype, other))
        else:
            wanted = _dtype(declared, made, dtype, None)
            fill = values if values and declared.gradient else _normal
            made[declared.name] = fill(generator, shape, wanted).to(wanted)
    upstream = {}
    for position, declared in enumerate(operator.outputs):
        generator = torch.Generator().manual_seed(seed * 1009 + 500 + position)
        wanted = _dtype(declared, made, dtype, None)
        tensor = (values or _normal)(generator, row_shape(declared, sizes), wanted)
        upstream[declared.name] = (tensor * UPSTREAM_SCALE).to(wanted)
    return Fixture(made, upstream, dict(scalars or default_scalars(operator)))


def _parameter(
    declared: Tensor, generator: torch.Generator, shape: tuple[int, ...]
) -> torch.Tensor:
    normal = torch.randn(shape, generator=generator)
    if declared.gradient == "chain":
        # A factor of products: sums of them keep the scale of the rows, and cancel.
        return normal / shape[-1] ** 0.5
    return normal * 0.5 + 1.0


def row_shape(declared: Tensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a declared tensor with its leading axes flattened to T."""
    return tuple(sizes["T" if s == "..." else s] for s in declared.shape)


def _dtype(
    declared: Tensor, made: Mapping[str, torch.Tensor], dtype: str, wanted: str | None
) -> torch.dtype:
    rule = wanted or (dtype if dtype in declared.dtype else declared.dtype[0])
    return made[rule[1:]].dtype if rule.startswith("=") else getattr(torch, rule)


def reach(dtype: torch.dtype) -> int:
    """2^+-reach: scales whose products with normal values and UPSTREAM_SCALE stay finite."""
    return 10 if dtype == torch.float16 else 20


def _normal(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def _decades(
    generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    # As many decades as leave sums of squares finite in FP32, and values finite in FP16.
    most = 3 if dtype == torch.float16 else 15
    return _of_exponents(generator, shape, -most, most)


def forty_decades(
    generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The same, down to where squares vanish; in FP16 the 10 decades that it has."""
    least, most = (-7, 3) if dtype == torch.float16 else (-25, 15)
    return _of_exponents(generator, shape, least, most)


def _of_exponents(
    generator: torch.Generator, shape: tuple[int, ...], least: int, most: int
) -> torch.Tensor:
    exponent = torch.randint(least, most + 1, shape, generator=generator).double()
    return (torch.randn(shape, generator=generator).double() * 10.0**exponent).float()


def _subnormal(
    generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    # Below the smallest normal number of the dtype.
    sign = torch.randint(0, 2, shape, generator=generator).float() * 2.0 - 1.0
    return torch.rand(shape, generator=generator) * sign * torch.finfo(dtype).tiny


def _cancelling(
    generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    # Large values that cancel in pairs, beside small terms that must survive.
    tensor = torch.randn(shape, generator=generator) * 2.0 ** reach(dtype)
    flat = tensor.view(-1)
    half = flat.numel() // 2
    flat[half : 2 * half] = flat[:half] * -1.0
    return tensor + torch.randn(shape, generator=generator)


def _non_finite(
    generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    # A few rows hold NaN or an infinity; the others must not notice.
    tensor = torch.randn(shape, generator=generator)
    flat = tensor.view(-1)
    places = torch.randint(0, flat.numel(), (5,), generator=generator)
    special = [float("nan"), float("inf"), float("-inf"), 0.0, 3.0e38]
    flat[places] = torch.tensor(special)
    return tensor


VALUES: dict[str, Values] = {
    "random": _normal,
    "decades": _decades,
    "subnormal": _subnormal,
    "cancelling": _cancelling,
    "non_finite": _non_finite,
}
