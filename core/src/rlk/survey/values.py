# SPDX-License-Identifier: Apache-2.0
"""One variant at one size: what of its bits depends on the batch, and how far from FP64 it is."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from rlk import dispatch
from rlk.arguments import dtype_name
from rlk.bench.variants import peers_of
from rlk.bench.work import size_of
from rlk.compare import same_bits
from rlk.errors import BackendError, PlatformError, RlkError
from rlk.execution import Execution
from rlk.gates.accuracy import judge_tensor, reference
from rlk.gates.candidate import Candidate, Run
from rlk.gates.casts import names_of
from rlk.gates.inputs import Fixture, fixture, real_sizes, row_elements, row_shape, smallest_sizes
from rlk.operator import Operator
from rlk.records import SurveyRow, TensorAccuracy
from rlk.survey.peers import held_to

# Rows of one call: those of gates on a CPU, where kernels are interpreted; on a GPU enough for a
# library to choose another kernel and for sums over rows to be long, and few enough for the oracle.
# Primes: compilers take sizes that are equal once for equal always, and would compile again for
# every other batch.
CPU_ROWS, GPU_ROWS = 131, 257
# 2^24 elements of the first input: what the oracle computes soon. Large samples are at least 3: of
# fewer there is no smaller batch.
MOST_ELEMENTS, FEWEST_ROWS = 1 << 24, 3
# Rows that are also run alone.
ALONE = 64
# Rows of smaller batches: primes, powers of two and one below.
BATCHES = (2, 3, 7, 16, 31, 64, 128, 255)
PADDING_ROWS = 15
# 1 in 100: a library whose outputs leave the contract more often computes something else; one that
# rounds once more, or approximates, leaves it less often.
OTHER_FUNCTION = 100


@dataclass(frozen=True)
class Place:
    """One operator at one size in one dtype, on this machine."""

    operator: Operator
    sizes: Mapping[str, int]
    dtype: str
    rows: int
    seed: int

    @property
    def device(self) -> torch.device:
        """The GPU where there is one."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def label(self) -> str:
        """Such as 131x2048, or 131x3072 and 131x6144 where outputs have another shape."""
        sizes = {**self.sizes, "T": self.rows}
        first, *_ = self.operator.inputs
        return size_of(row_shape(tensor, sizes) for tensor in (first, *self.operator.outputs))

    def batch(self) -> Fixture:
        """Inputs and upstream gradients."""
        return fixture(self.operator, self.dtype, rows=self.rows, sizes=self.sizes, seed=self.seed)


def places(operator: Operator, dtype: str, rows: int | None, seed: int) -> list[Place]:
    """The sizes of models; on a CPU, where some are declared for gates, those."""
    gpu = torch.cuda.is_available()
    small = operator.gate_sizes and not gpu
    found = []
    for sizes in [smallest_sizes(operator)] if small else real_sizes(operator):
        most = max(FEWEST_ROWS, MOST_ELEMENTS // row_elements(operator, sizes))
        count = rows or min(GPU_ROWS if gpu else CPU_ROWS, most)
        found.append(Place(operator, sizes, dtype, count, seed))
    return found


def names(operator: Operator) -> list[str]:
    """Every variant: our backends, then other libraries."""
    return [*(b.name for b in operator.backends), *(peer.name for peer in peers_of(operator))]


def survey(place: Place, name: str) -> SurveyRow:
    """The row of one variant, whatever becomes of the attempt."""
    operator, ours = place.operator, place.operator.backend(name) is not None
    versions = {peer.name: peer.version() or "" for peer in peers_of(operator)}
    row = SurveyRow(
        operator=operator.name,
        size=place.label,
        dtype=place.dtype,
        variant=name,
        version=versions.get(name, ""),
        ours=ours,
        rows=place.rows,
    )
    declared = operator if ours else held_to(operator, name)
    try:
        dispatch.choose(declared, place.device, name)
    except (BackendError, PlatformError) as error:
        return _ended(row, "not applicable", str(error).rpartition("cannot run here: ")[2])
    try:
        return _measured(row, place, Candidate(Execution(declared), name, place.device))
    except Exception as error:
        if ours and not isinstance(error, RlkError):
            raise
        # A library that fails says so in its row; the others go on.
        lacking = isinstance(error, BackendError) and not ours
        return _ended(row, "not applicable" if lacking else "failed", error)


def _ended(row: SurveyRow, verdict: str, error: Exception | str) -> SurveyRow:
    reason = error if isinstance(error, str) else " ".join(f"{error}".split())[:200]
    if isinstance(error, Exception) and not isinstance(error, RlkError):
        reason = f"{type(error).__name__}: {reason}"
    return _with(row, verdict=verdict, reason=reason)


def _with(row: SurveyRow, **changes: object) -> SurveyRow:
    values = {name: getattr(row, name) for name in row.__struct_fields__}
    return SurveyRow(**{**values, **changes})


def _measured(row: SurveyRow, place: Place, candidate: Candidate) -> SurveyRow:
    operator = candidate.operator
    batch = place.batch()
    whole = candidate.run_fixture(batch)
    accuracy, far = _accuracy(operator, batch, whole)
    if far is not None:
        return _with(row, verdict="other function", reason=far, accuracy=accuracy)
    rows = [t.name for t in operator.outputs]
    rows += [f"d{t.name}" for t in operator.differentiable if t.gradient == "row"]
    judged = sorted({i * place.rows // ALONE for i in range(ALONE)} & set(range(place.rows)))
    alone = dict.fromkeys(rows, 0)
    for index in judged:
        run = _run(candidate, batch, [index])
        for name in rows:
            alone[name] += not same_bits(run.tensors[name][0], whole.tensors[name][index])
    sizes = [size for size in BATCHES if size < place.rows]
    differing = dict.fromkeys(rows, 0)
    for size in sizes:
        run = _run(candidate, batch, list(range(size)))
        for name in rows:
            differing[name] += not same_bits(run.tensors[name], whole.tensors[name][:size])
    return _with(
        row,
        rows_judged=len(judged),
        rows_alone=alone,
        batches=len(sizes),
        batches_differing=differing,
        order_free=_order_free(candidate, place),
        accuracy=accuracy,
    )


def _accuracy(
    operator: Operator, batch: Fixture, run: Run
) -> tuple[dict[str, TensorAccuracy], str | None]:
    """Outputs and gradients against FP64, and why it is another function, if it is."""
    casts = {n: t for n, t in run.values.items() if n in names_of(operator)}
    expected = reference(operator, batch, casts)
    found, far = {}, None
    outputs = [t.name for t in operator.outputs]
    for name in [*outputs, *(f"d{t.name}" for t in operator.differentiable)]:
        actual = run.tensors[name]
        if actual.shape != expected[name].shape:
            return {}, f"{name} is {list(actual.shape)}, not {list(expected[name].shape)}"
        judged = judge_tensor(operator, name, actual, expected[name])
        beyond = judged.total - judged.within
        found[name] = TensorAccuracy(
            dtype=dtype_name(actual.dtype),
            elements=judged.total,
            beyond=beyond,
            correctly_rounded=judged.correctly_rounded,
            worst_ulp=_finite(judged.max_ulp_at_rms),
            max_abs_error=_finite(judged.max_abs_error),
            ulp_histogram=judged.ulp_histogram,
        )
        if name in outputs and beyond * OTHER_FUNCTION > judged.total:
            far = far or f"{beyond} of {judged.total} elements of {name} beyond the contract"
    return found, far


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _order_free(candidate: Candidate, place: Place) -> dict[str, bool]:
    """Whether each parameter gradient keeps its bits under other orders, and rows without any.

    In FP32 where the operator takes it: the rounding to a narrow dtype would hide most orders.
    """
    parameters = [f"d{t.name}" for t in candidate.operator.parameters]
    if not parameters:
        return {}
    strict = "float32" in place.operator.inputs[0].dtype
    batch = (replace(place, dtype="float32") if strict else place).batch()
    whole = candidate.run_fixture(batch)
    order = torch.randperm(batch.rows, generator=torch.Generator().manual_seed(0)).tolist()
    runs = [
        _run(candidate, batch, order),
        _run(candidate, batch, list(reversed(range(batch.rows)))),
        _run(candidate, batch, list(range(batch.rows)), PADDING_ROWS),
    ]
    return {
        name: all(same_bits(run.tensors[name], whole.tensors[name]) for run in runs)
        for name in parameters
    }


def _run(candidate: Candidate, batch: Fixture, rows: list[int], padding: int = 0) -> Run:
    """A call of these rows, behind them rows of zeros."""
    operator = candidate.operator
    declared = {t.name: t for t in operator.inputs + operator.outputs}

    def picked(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not declared[name].has_rows:
            return tensor
        zeros = tensor.new_zeros((padding, *tensor.shape[1:]))
        return torch.cat([tensor[torch.tensor(rows)], zeros])

    inputs = {name: picked(name, t) for name, t in batch.inputs.items()}
    upstream = {name: picked(name, t) for name, t in batch.upstream.items()}
    return candidate.run(inputs, upstream, batch.scalars)
