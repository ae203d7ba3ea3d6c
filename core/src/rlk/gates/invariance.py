# SPDX-License-Identifier: Apache-2.0
"""A row's bits against themselves: the same rows, arranged into calls in other ways."""

from collections.abc import Mapping
from typing import Any

import torch

from rlk.compare import same_bits
from rlk.gates.candidate import Candidate, Run
from rlk.gates.chains import chain_records
from rlk.gates.inputs import (
    SAMPLE_LENGTHS,
    Fixture,
    fixture,
    judged_sizes,
    reach,
    smallest_sizes,
)
from rlk.gates.record import Record
from rlk.gates.tokens import of_tokens, tokens_as_rows
from rlk.gates.transforms import (
    PADDING,
    Arrangement,
    Call,
    chunked,
    gather,
    one_call,
    restore,
    sample_rows,
    short_matrix,
)
from rlk.gates.verdict import Verdict
from rlk.operator import Tensor
from rlk.reduce import exact_sum

# 261: above 256, where a block size chosen from the row count often changes.
ORDER_ROWS = 261
# 16 and 3: rows in calls of their own, and permutations, where the short tier must end soon.
FEW_ROWS = 16
FEW_PERMUTATIONS, PERMUTATIONS = 3, 10
# 1025 and 32 769: one above the largest powers of two whose neighbourhood is swept.
MANY_ROWS = 1025
MOST_ROWS = 32769
PADDINGS = {"zero": 0.0, "garbage": 1.7e4, "nan": float("nan")}


def forward_invariance(verdict: Verdict) -> list[Record]:
    """Outputs and saved state, every configuration against the canonical one."""
    operator = verdict.case.operator
    names = [t.name for t in operator.outputs + operator.saved if t.has_rows]
    return row_records(verdict, names) + _token_records(verdict, names)


def gradient_invariance(verdict: Verdict) -> list[Record]:
    """Row gradients as forward; parameter gradients through merged exact states, or as chains."""
    operator = verdict.case.operator
    names = [f"d{t.name}" for t in operator.differentiable if t.gradient == "row"]
    records = row_records(verdict, names) + parameter_records(verdict)
    if operator.chain_parameters:
        records += chain_records(verdict)
    sums = set(operator.exact_sums)
    return records + _token_records(verdict, [name for name in names if name not in sums])


def _token_records(verdict: Verdict, names: list[str]) -> list[Record]:
    """What one sample's tokens have of these tensors, each token as a row."""
    tokens = tokens_as_rows(verdict)
    if tokens is None:
        return []
    operator = tokens.case.operator
    declared = {t.name: t for t in operator.outputs + operator.saved}
    declared |= {f"d{t.name}": t for t in operator.inputs}
    return of_tokens(row_records(tokens, [name for name in names if declared[name].has_rows]))


def row_records(verdict: Verdict, names: list[str]) -> list[Record]:
    """Each row tensor in each configuration against the canonical one."""
    records = []
    for prefix, sizes in judged_sizes(verdict.case.operator, verdict.case.tier).items():
        records += _matrix_records(verdict, names, sizes, prefix)
    if verdict.case.tier == "full":
        records += _neighbour_records(verdict, names)
        records += _population_records(verdict, names)
    return records


def _matrix_records(
    verdict: Verdict, names: list[str], sizes: Mapping[str, int], prefix: str
) -> list[Record]:
    batch = _batch(verdict, sizes)
    matrix = short_matrix(SAMPLE_LENGTHS)
    canonical, others = matrix[0], [(a, "zero") for a in matrix[1:]]
    if verdict.case.tier == "full":
        others += [(a, kind) for a in matrix[-2:] for kind in ("garbage", "nan")]
    return _arrangement_records(verdict, names, batch, canonical, others, prefix)


def _population_records(verdict: Verdict, names: list[str]) -> list[Record]:
    """Batches one below, at and above every power of two against one large batch."""
    sizes = smallest_sizes(verdict.case.operator)
    powers = [2**p for p in range(1, 11)]
    counts = sorted({n for power in powers for n in (power - 1, power, power + 1)})
    records = _sweep_records(verdict, names, sizes, MANY_ROWS, counts)
    if len(sizes) == 1:
        narrow = dict.fromkeys(sizes, 3)
        records += _sweep_records(verdict, names, narrow, MOST_ROWS, [32767, 32768])
    return records


def _sweep_records(
    verdict: Verdict, names: list[str], sizes: Mapping[str, int], rows: int, counts: list[int]
) -> list[Record]:
    batch = _batch(verdict, sizes, rows)
    others = [(one_call(f"first_{n}_of_{rows}", range(n)), "zero") for n in counts]
    return _arrangement_records(verdict, names, batch, one_call("whole", range(rows)), others)


def _arrangement_records(
    verdict: Verdict,
    names: list[str],
    batch: Fixture,
    canonical: Arrangement,
    others: list[tuple[Arrangement, str]],
    prefix: str = "",
) -> list[Record]:
    gradients = verdict.case.judgment != "forward_invariance"
    expected, base = run_arrangement(verdict.candidate, batch, canonical, gradients=gradients)
    records = []
    for arrangement, padding in others:
        actual, run = run_arrangement(verdict.candidate, batch, arrangement, padding, gradients)
        suffix = "" if padding == "zero" else f"_{padding}"
        for name in names:
            rows, faults = restore(arrangement, actual[name])
            reference, _ = restore(canonical, expected[name])
            reference = reference[list(arrangement.covered)]
            records.append(
                verdict.bits(
                    name,
                    rows,
                    reference,
                    config=prefix + arrangement.name + suffix,
                    pair=canonical.name,
                    runs=(base, run),
                    faults=tuple(faults),
                )
            )
    return records


def parameter_records(verdict: Verdict) -> list[Record]:
    """Exact parameter gradients of each configuration, and sums over all singletons."""
    records: list[Record] = []
    if not verdict.case.operator.exact_parameters:
        return records
    for prefix, sizes in judged_sizes(verdict.case.operator, verdict.case.tier).items():
        records += _parameter_matrix_records(verdict, sizes, prefix)
    return records


def _parameter_matrix_records(
    verdict: Verdict, sizes: Mapping[str, int], prefix: str
) -> list[Record]:
    batch = _batch(verdict, sizes)
    matrix = short_matrix(SAMPLE_LENGTHS)
    single = [a for a in matrix if a.name.startswith("singleton")]
    whole = [a for a in single if not a.name.endswith("chunked_7")]
    groups: dict[str, list[Arrangement]] = {a.name: [a] for a in matrix[1:] if a not in single}
    groups["all_singletons"] = whole
    groups["all_singletons_chunked_7"] = [a for a in single if a not in whole]
    expected, base = whole_states(verdict.candidate, batch, matrix[0])
    records = []
    for name, arrangements in groups.items():
        actual, run = summed_states(verdict.candidate, batch, arrangements)
        records += _state_records(verdict, actual, expected, prefix + name, (base, run))
    return records


def order_free(verdict: Verdict) -> list[Record]:
    """The operator's own exact sums, over rows and over the tokens of one."""
    records = _parameter_order_records(verdict) if verdict.case.operator.parameters else []
    tokens = tokens_as_rows(verdict)
    if tokens is not None:
        records += of_tokens(_token_order_records(tokens, ORDER_ROWS))
        if verdict.case.tier == "full":
            most = max(w.sizes["T"] for w in tokens.case.operator.workloads)
            records += of_tokens(_token_order_records(tokens, most, f"of_{most}_"))
    return records


def _parameter_order_records(verdict: Verdict) -> list[Record]:
    """Parameter gradients under permutation, chunking and padding of rows."""
    rows = ORDER_ROWS
    batch, order = _spread_batch(verdict, rows), list(range(rows))
    arrangements = _permutations(verdict, rows)
    arrangements += [chunked(f"chunks_of_{size}", order, size) for size in (7, 64)]
    arrangements.append(_one_by_one(order, rows if verdict.case.tier == "full" else FEW_ROWS))
    arrangements.append(_zero_padded(order))
    expected, base = whole_states(verdict.candidate, batch, one_call("whole", order))
    records = []
    for arrangement in arrangements:
        actual, run = summed_states(verdict.candidate, batch, [arrangement])
        records += _state_records(
            verdict, actual, expected, arrangement.name, (base, run), pair="whole"
        )
    return records


def _token_order_records(verdict: Verdict, tokens: int, prefix: str = "") -> list[Record]:
    """Rounded sums over tokens under their permutation and zero padding, tokens being rows."""
    batch, order = _spread_batch(verdict, tokens), list(range(tokens))
    expected, base = run_arrangement(verdict.candidate, batch, one_call("whole", order))
    records = []
    for arrangement in (*_permutations(verdict, tokens), _zero_padded(order)):
        actual, run = run_arrangement(verdict.candidate, batch, arrangement)
        records += [
            verdict.bits(
                name,
                actual[name][0],
                expected[name][0],
                config=prefix + arrangement.name,
                pair="whole",
                runs=(base, run),
            )
            for name in verdict.case.operator.exact_sums
        ]
    return records


def _spread_batch(verdict: Verdict, rows: int) -> Fixture:
    operator, dtype, seed = verdict.case.operator, verdict.case.dtype, verdict.case.seed
    sizes = smallest_sizes(operator)
    return fixture(operator, dtype, rows=rows, sizes=sizes, seed=seed, values=_spread_rows)


def _permutations(verdict: Verdict, rows: int) -> list[Arrangement]:
    generator = torch.Generator().manual_seed(verdict.case.seed)
    return [
        one_call(f"permutation_{i}", torch.randperm(rows, generator=generator).tolist())
        for i in range(PERMUTATIONS if verdict.case.tier == "full" else FEW_PERMUTATIONS)
    ]


def _zero_padded(order: list[int]) -> Arrangement:
    padding = [PADDING] * 15
    return one_call("zero_padded", [*padding, *order, *padding])


def _one_by_one(order: list[int], count: int) -> Arrangement:
    """The first `count` rows in calls of their own, the others in one."""
    singles = tuple(Call((row,), (1,)) for row in order[:count])
    rest = tuple(order[count:])
    calls = singles + ((Call(rest, (len(rest),)),) if rest else ())
    return Arrangement(f"{count}_chunks_of_1", calls)


def run_arrangement(
    candidate: Candidate,
    batch: Fixture,
    arrangement: Arrangement,
    padding: str = "zero",
    gradients: bool = True,
) -> tuple[dict[str, list[torch.Tensor]], Run]:
    """Row tensors of every call by name, and one run that stands for all calls."""
    collected: dict[str, list[torch.Tensor]] = {}
    total = Run({}, {})
    for call in arrangement.calls:
        run = candidate.run(*_arranged(candidate, batch, call, padding), gradients=gradients)
        total.directions = run.directions
        total.launches += run.launches
        total.faults += run.faults
        for name, tensor in run.tensors.items():
            collected.setdefault(name, []).append(tensor)
    return collected, total


def summed_states(
    candidate: Candidate, batch: Fixture, arrangements: list[Arrangement]
) -> tuple[dict[str, torch.Tensor], Run]:
    """Exact states merged over all calls, and one run that stands for all calls."""
    total = Run({}, {})
    merged: dict[str, torch.Tensor] = {}
    for arrangement in arrangements:
        for call in arrangement.calls:
            run = candidate.sums(*_arranged(candidate, batch, call, "zero"))
            total.launches += run.launches
            total.faults += run.faults
            for name, state in run.states.items():
                merged[name] = exact_sum.merge(merged[name], state) if name in merged else state
    return merged, total


def whole_states(
    candidate: Candidate, batch: Fixture, arrangement: Arrangement
) -> tuple[dict[str, torch.Tensor], Run]:
    """Exact states of one call, whose rounding must be what autograd returns."""
    (call,) = arrangement.calls
    run = candidate.run(*_arranged(candidate, batch, call, "zero"), states=True)
    return run.states, run


def _arranged(candidate: Candidate, batch: Fixture, call: Call, padding: str) -> Any:
    operator = candidate.operator
    fill = torch.tensor(PADDINGS[padding])

    def arranged(declared: Tensor, source: Mapping[str, torch.Tensor]) -> torch.Tensor:
        tensor = source[declared.name]
        return gather(tensor, call, fill) if declared.has_rows else tensor

    inputs = {t.name: arranged(t, batch.inputs) for t in operator.inputs}
    upstream = {t.name: arranged(t, batch.upstream) for t in operator.outputs}
    return inputs, upstream, batch.scalars


def _state_records(
    verdict: Verdict,
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    config: str,
    runs: tuple[Run, ...],
    pair: str = "canonical",
) -> list[Record]:
    # Shown in FP32, the highest precision an exact state rounds to, and judged as states: a
    # rounding would hide most differences.
    return [
        verdict.bits(
            name,
            exact_sum.round(actual[name], torch.float32),
            exact_sum.round(expected[name], torch.float32),
            config=config,
            pair=pair,
            runs=runs,
            faults=() if _same_sums(actual[name], expected[name]) else ("exact states differ",),
        )
        for name in expected
    ]


def _same_sums(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    empty = torch.zeros_like(expected)
    return same_bits(exact_sum.merge(actual, empty), exact_sum.merge(expected, empty))


def _batch(verdict: Verdict, sizes: Mapping[str, int], rows: int = sum(SAMPLE_LENGTHS)) -> Fixture:
    operator, dtype, seed = verdict.case.operator, verdict.case.dtype, verdict.case.seed
    return fixture(operator, dtype, rows=rows, sizes=sizes, seed=seed)


def _neighbour_records(verdict: Verdict, names: list[str]) -> list[Record]:
    batch = _batch(verdict, smallest_sizes(verdict.case.operator))
    first = sample_rows(SAMPLE_LENGTHS)[0]
    arrangement = one_call("canonical", range(batch.rows))
    changed = Fixture(
        {n: _disturb(t, verdict, n, len(first)) for n, t in batch.inputs.items()},
        {n: _disturb(t, verdict, n, len(first)) for n, t in batch.upstream.items()},
        batch.scalars,
    )
    expected, base = run_arrangement(verdict.candidate, batch, arrangement)
    actual, run = run_arrangement(verdict.candidate, changed, arrangement)
    return [
        verdict.bits(
            name,
            actual[name][0][: len(first)],
            expected[name][0][: len(first)],
            config="neighbours_changed",
            pair="canonical",
            runs=(base, run),
        )
        for name in names
    ]


def _disturb(tensor: torch.Tensor, verdict: Verdict, name: str, keep: int) -> torch.Tensor:
    operator = verdict.case.operator
    declared = {t.name: t for t in operator.inputs + operator.outputs}[name]
    if not declared.has_rows:
        return tensor
    tensor = tensor.clone()
    tensor[keep:] = tensor[keep:].flip(0) * 3.0
    return tensor


def _spread_rows(
    generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    # Row scales as far apart as the dtype allows and some zero rows: order shows most.
    most = reach(dtype)
    scale = torch.randint(-most, most + 1, (shape[0],), generator=generator).float().exp2()
    scale[torch.randint(0, shape[0], (shape[0] // 8,), generator=generator)] = 0.0
    tensor = torch.randn(shape, generator=generator)
    return tensor * scale.view(-1, *(1 for _ in shape[1:]))
