# SPDX-License-Identifier: Apache-2.0
"""The value of a result against the FP64 oracle, by the contract and nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import torch

from rlk import compare, contract
from rlk.arguments import dtype_name
from rlk.gates.candidate import Run
from rlk.gates.casts import Casts, names_of
from rlk.gates.inputs import Fixture, fixture, judged_sizes, scalar_variants
from rlk.gates.record import Record
from rlk.gates.verdict import Verdict
from rlk.operator import Operator

# Primes above any block, and elements enough to tell a fraction of 99.9 % from chance; rows that
# hold tokens are 43.
ROWS, ROWS_OF_TOKENS = 131, 43


@dataclass(frozen=True)
class Accuracy:
    """One tensor held against its FP64 reference."""

    faults: tuple[str, ...]
    within: int
    total: int
    max_abs_error: float
    mean_abs_error: float
    max_ulp_at_rms: float
    correctly_rounded: float
    bound: contract.AccuracyBound
    ulp_histogram: dict[str, int]


def forward_accuracy(verdict: Verdict) -> list[Record]:
    """Every output and saved tensor against the oracle."""
    operator = verdict.case.operator
    return _records(verdict, [t.name for t in operator.outputs + operator.saved])


def gradient_accuracy(verdict: Verdict) -> list[Record]:
    """Every gradient against autograd of the oracle, and what backward shows of declared casts."""
    names = [f"d{t.name}" for t in verdict.case.operator.differentiable]
    return _records(verdict, names)


def reference(
    operator: Operator, batch: Fixture, given: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Outputs, saved state and gradients of the oracle on the same quantised inputs, in FP64.

    `given` are a candidate's values of declared casts, by name. The oracle goes on from them and,
    of the casts themselves, returns what was to be rounded.
    """
    leaves = [
        batch.inputs[t.name].detach().cpu().double().requires_grad_(t.gradient is not None)
        for t in operator.inputs
    ]
    options = dict(batch.scalars)
    casts = Casts(operator, batch.inputs[operator.inputs[0].name].dtype, given or {})
    if operator.casts:
        options["cast"] = casts
    # Scalars as the caller wrote them: the oracle must not share the declaration's aliases.
    results = operator.oracle(*leaves, **options)
    outputs = results[: len(operator.outputs)]
    upstream = [batch.upstream[t.name].detach().cpu().double() for t in operator.outputs]
    gradients = torch.autograd.grad(outputs, [t for t in leaves if t.requires_grad], upstream)
    names = [t.name for t in operator.outputs + operator.saved]
    named = dict(zip(names, results, strict=True))
    for declared, gradient in zip(operator.differentiable, gradients, strict=True):
        named[f"d{declared.name}"] = gradient
    return {name: tensor.detach() for name, tensor in named.items()} | casts.exact


def judge_tensor(
    operator: Operator, name: str, actual: torch.Tensor, expected: torch.Tensor
) -> Accuracy:
    """Hold an output, saved tensor or gradient of any float dtype against its FP64 reference.

    The ceiling is element-wise atol + rtol * |expected|. Under it, the largest error is bounded
    in ulp at the reference's root mean square, or at the element where that is larger. In narrow
    dtypes nearly every element of a row tensor or chain must be the correctly rounded one; an exact
    sum has too few elements for a fraction, and sums the roundings of its contributions. A chain
    may be small too: where one element would be too many, there is no fraction. A declared cast
    must be the rounding of an FP32 value within the bound of FP32: what follows is judged given it.
    """
    actual = actual.detach().cpu()
    forward = name in {t.name for t in operator.outputs + operator.saved}
    judgment = "forward_accuracy" if forward else "gradient_accuracy"
    bound = contract.load().accuracy(judgment, operator.category, dtype_name(actual.dtype))
    error = (actual.double() - expected).abs()
    within = int((error <= bound.atol + bound.rtol * expected.abs()).sum())
    rounded = expected.to(actual.dtype)
    correct = (compare.raw_bits(rounded) == compare.raw_bits(actual)).double().mean().item()
    # At the larger of the element and the RMS: products have heavy tails, and their largest
    # element may stand any distance above the RMS.
    scale = torch.maximum(expected.abs(), expected.square().mean().sqrt())
    worst = float((error / _ulp(scale, actual.dtype)).max())
    faults = []
    if within < error.numel():
        faults.append(
            f"{error.numel() - within} of {error.numel()} elements beyond "
            f"{bound.atol} + {bound.rtol} * |reference|"
        )
    if not worst <= bound.max_ulp_at_rms:
        faults.append(f"largest error {worst:.3g} ulp at RMS, bound {bound.max_ulp_at_rms}")
    exact = name in {f"d{t.name}" for t in operator.exact_parameters}
    chain = name in {f"d{t.name}" for t in operator.chain_parameters}
    few = exact or (chain and (1 - bound.correctly_rounded) * rounded.numel() < 1)
    if not few and correct < bound.correctly_rounded:
        faults.append(f"{correct:.5f} correctly rounded, bound {bound.correctly_rounded}")
    if name in names_of(operator):
        faults += _wrong_casts(operator, judgment, actual, expected, scale)
    return Accuracy(
        faults=tuple(faults),
        within=within,
        total=error.numel(),
        max_abs_error=float(error.max()),
        mean_abs_error=float(error.mean()),
        max_ulp_at_rms=worst,
        correctly_rounded=correct,
        bound=bound,
        ulp_histogram=compare.ulp_histogram(actual, rounded),
    )


def _wrong_casts(
    operator: Operator,
    judgment: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    scale: torch.Tensor,
) -> list[str]:
    # Rounding is monotonic: between those of the bounds lies that of every value between them.
    ulp = contract.load().accuracy(judgment, operator.category, "float32").max_ulp_at_rms
    error = ulp * _ulp(scale, torch.float32)
    low, high = ((expected + e).to(actual.dtype) for e in (-error, error))
    wrong = int((~((low <= actual) & (actual <= high))).sum())
    if not wrong:
        return []
    return [
        f"{wrong} of {actual.numel()} elements are no rounding of a value within {ulp:g} ulp of "
        "FP32 at RMS"
    ]


def impostors(expected: torch.Tensor) -> dict[str, torch.Tensor]:
    """Wrong answers that a judge must reject: zeros, shuffled rows, flipped signs."""
    order = torch.arange(expected.shape[0]).roll(1)
    return {
        "zeros": torch.zeros_like(expected),
        "shuffled": expected[order],
        "sign-flipped": expected * -1.0,
    }


def _records(verdict: Verdict, names: list[str]) -> list[Record]:
    case = verdict.case
    operator = case.operator
    records = []
    rows = ROWS_OF_TOKENS if operator.token_axis else ROWS
    for (prefix, sizes), (config, scalars) in product(
        _told_sizes(operator, case.tier).items(), scalar_variants(operator).items()
    ):
        batch = fixture(
            operator, case.dtype, rows=rows, sizes=sizes, seed=case.seed, scalars=scalars
        )
        gradients = case.judgment == "gradient_accuracy"
        run = verdict.candidate.run_fixture(batch, gradients=gradients)
        casts = {n: t for n, t in run.values.items() if n in names_of(operator)}
        expected = reference(operator, batch, casts)
        judged = names + [n for n in run.between if n in casts]
        records += [_record(verdict, name, run, expected, prefix + config) for name in judged]
    return records


def _told_sizes(operator: Operator, tier: str) -> dict[str, dict[str, int]]:
    """Sizes at which a value can be told from a wrong one."""
    return {
        prefix: sizes
        for prefix, sizes in judged_sizes(operator, tier).items()
        if not operator.too_small(sizes)
    }


def _record(
    verdict: Verdict, name: str, run: Run, expected: Mapping[str, torch.Tensor], config: str
) -> Record:
    operator = verdict.case.operator
    actual = run.values[name]
    if actual.shape != expected[name].shape:
        shapes = f"{name} is {list(actual.shape)}, oracle {list(expected[name].shape)}"
        return verdict.record(
            name, (shapes,), config=config, shape=list(actual.shape), dtype=dtype_name(actual.dtype)
        )
    accuracy = judge_tensor(operator, name, actual, expected[name])
    faults = (*verdict.faults((run,), name), *accuracy.faults)
    for what, impostor in impostors(expected[name]).items():
        fooled = judge_tensor(operator, name, impostor.to(actual.dtype), expected[name])
        if not fooled.faults:
            faults += (f"the judge accepts {what} in place of {name}",)
    return verdict.record(
        name,
        faults,
        config=config,
        shape=list(actual.shape),
        dtype=dtype_name(actual.dtype),
        max_abs_error=accuracy.max_abs_error,
        mean_abs_error=accuracy.mean_abs_error,
        ulp_histogram=accuracy.ulp_histogram,
        correctly_rounded=accuracy.correctly_rounded,
        atol=accuracy.bound.atol,
        rtol=accuracy.bound.rtol,
    )


def _ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # The spacing of `dtype` at positive values.
    info = torch.finfo(dtype)
    exponent = torch.floor(torch.log2(values.clamp(min=info.tiny)))
    return torch.exp2(exponent) * info.eps
