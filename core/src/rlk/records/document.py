# SPDX-License-Identifier: Apache-2.0
"""The records as strict structs; `records.schema.json` is derived from them."""

import shlex
import sys
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from rlk import environment
from rlk.gates.record import Judgment, Status

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Commit = Annotated[str, Meta(pattern="^[0-9a-f]{40}$")]

# How an attempt at a variant ended.
Verdict = Literal["measured", "failed", "not applicable", "other function"]
# What an attempt ended with, in words.
VERDICTS: dict[Verdict, str] = {
    "measured": "measured",
    "failed": "attempted and failed",
    "not applicable": "not applicable",
    "other function": "excluded by the probe: it computes another function",
}


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Immutable; an unknown key is an error."""


class Source(Strict, frozen=True, kw_only=True):
    """Where a package came from; `digest` is of the files that decide its results."""

    version: str
    commit: Commit | None
    dirty: bool | None
    digest: Digest | None = None


class Origin(Strict, frozen=True, kw_only=True):
    """The command of a run, the sources it ran, and the machine."""

    command: str
    packages: dict[str, Source]
    device: str
    driver: str | None
    compute_capability: str | None
    python: str
    torch: str
    triton: str | None
    cuda: str | None

    @property
    def platform(self) -> str:
        """Such as sm_90, or cpu: what columns of the support matrix are named after."""
        capability = self.compute_capability
        return "cpu" if capability is None else f"sm_{capability.replace('.', '')}"

    @property
    def commit(self) -> str | None:
        """The commit of core, if it is known."""
        core = self.packages.get("rlk-core")
        return None if core is None else core.commit

    @property
    def dirty(self) -> bool:
        """Whether any package differed from its commit, or is not known to equal it."""
        known = "rlk-core" in self.packages
        return not known or any(source.dirty is not False for source in self.packages.values())


# The variant of a row that is no function's.
FLOOR = "floor"


class BenchRow(Strict, frozen=True, kw_only=True, omit_defaults=True):
    """One variant at one size: microseconds, ratios to the floor and to the fastest peer.

    `floor` is a variant too: the time in which the same bytes are moved and nothing computed.
    `hard_data` are times of backward on upstream gradients that make an exact sum harder, as
    multiples of the ordinary time. `host_us` is a forward call that records nothing, `host_grad_us`
    one that records gradients, `host_train_us` that one and its backward.
    """

    operator: str
    size: str
    layout: str
    dtype: str
    variant: str
    version: str = ""
    ours: bool = False
    verdict: Verdict = "measured"
    reason: str | None = None
    rows: int | None = None
    forward_us: float | None = None
    forward_spread_us: float | None = None
    forward_ratio: float | None = None
    backward_us: float | None = None
    backward_spread_us: float | None = None
    both_us: float | None = None
    both_ratio: float | None = None
    peer_ratio: float | None = None
    terabytes_per_second: dict[str, float] = {}
    extra_mib: float | None = None
    host_us: float | None = None
    host_grad_us: float | None = None
    host_train_us: float | None = None
    eager_us: float | None = None
    eager_train_us: float | None = None
    sets: int | None = None
    hard_data: dict[str, float] = {}


def fastest_other(rows: Iterable[BenchRow], time: str = "both_us") -> BenchRow | None:
    """Who of the variants at one size that are not ours is first, in forward and backward."""
    timed = [r for r in rows if not r.ours and r.variant != FLOOR and getattr(r, time) is not None]
    return min(timed, key=attrgetter(time), default=None)


class Bench(Strict, frozen=True, kw_only=True, tag_field="schema", tag="rlk.bench/2"):
    """A run of `rlk bench`."""

    origin: Origin
    method: str
    interrupted: bool = False
    rows: list[BenchRow]


class ConventionRow(Strict, frozen=True, kw_only=True, omit_defaults=True):
    """Elements of a function's first output whose bits are not those of ours, by its rounding.

    `ppm` are those of a million; `seeds` of `of` seeds have any. `missing` says why there is none.
    """

    operator: str
    size: str
    dtype: str
    rounding: str
    other: str
    version: str = ""
    ppm: float | None = None
    seeds: int | None = None
    of: int | None = None
    missing: str | None = None


class Conventions(Strict, frozen=True, kw_only=True, tag_field="schema", tag="rlk.conventions/1"):
    """A run of `python -m rlk.bench.conventions`."""

    origin: Origin
    method: str
    interrupted: bool = False
    rows: list[ConventionRow]


class TensorAccuracy(Strict, frozen=True, kw_only=True):
    """One tensor of a variant against the FP64 oracle.

    `beyond` elements of `elements` exceed the element-wise tolerance of the contract; `worst_ulp`
    is the largest error in ulp at the reference's root mean square.
    """

    dtype: str
    elements: int
    beyond: int
    correctly_rounded: float
    worst_ulp: float | None
    max_abs_error: float | None
    ulp_histogram: dict[str, int]


class SurveyRow(Strict, frozen=True, kw_only=True, omit_defaults=True):
    """What a variant computes, and what of it depends on the batch.

    `rows_alone` counts, by tensor, how many of `rows_judged` rows have other bits alone than in
    their batch; `batches_differing` in how many of `batches` smaller batches any row has.
    `order_free` says by parameter gradient whether its bits survive permuted rows and padding, in
    FP32 where the operator takes it.
    """

    operator: str
    size: str
    dtype: str
    variant: str
    version: str = ""
    ours: bool = False
    verdict: Verdict = "measured"
    reason: str | None = None
    rows: int | None = None
    rows_judged: int | None = None
    rows_alone: dict[str, int] = {}
    batches: int | None = None
    batches_differing: dict[str, int] = {}
    order_free: dict[str, bool] = {}
    accuracy: dict[str, TensorAccuracy] = {}

    @property
    def worst_gradient_ulp(self) -> float | None:
        """The largest error of any gradient."""
        found = [a.worst_ulp for name, a in self.accuracy.items() if name.startswith("d")]
        return max((u for u in found if u is not None), default=None)


class Survey(Strict, frozen=True, kw_only=True, tag_field="schema", tag="rlk.survey/1"):
    """A run of `rlk survey`."""

    origin: Origin
    seed: int
    interrupted: bool = False
    rows: list[SurveyRow]


class ExactGradRow(Strict, frozen=True, kw_only=True):
    """Backward of one operator at one size, its parameter gradients rounded or added as states.

    `overhead` is the longer time as a share of the shorter. The peaks are what a step of either
    kind, and the end of a block, hold beyond what was there before, measured; `state_bytes` are
    there before, all the time.
    """

    operator: str
    size: str
    rows: int
    columns: int
    dtype: str
    rounding_us: float
    rounding_spread_us: float
    exact_us: float
    exact_spread_us: float
    overhead: float
    end_of_block_host_us: float
    state_bytes: int
    rounding_peak_bytes: int
    exact_peak_bytes: int
    end_of_block_peak_bytes: int


class ExactGrad(Strict, frozen=True, kw_only=True, tag_field="schema", tag="rlk.exact-grad/1"):
    """A run of `python -m rlk.exact_grad.overhead`; `wrong` says what exceeds its limit."""

    origin: Origin
    wrong: list[str]
    interrupted: bool = False
    rows: list[ExactGradRow]


class ProfileRow(Strict, frozen=True, kw_only=True, omit_defaults=True):
    """One launch of a kernel, the `launch`-th of its direction, and what its GPU counted.

    Shares are in per cent: of peak bandwidth (`dram_pct`) and peak throughput (`sm_pct`) while the
    kernel ran, of the cycles in which a processor was active for tensor cores, issue and occupancy.
    `stall` is the reason for which most warps wait, `stalled_warps_per_issue` how many do. What
    the GPU does not count is absent.
    """

    operator: str
    size: str
    layout: str
    dtype: str
    backend: str
    direction: Literal["forward", "backward"]
    launch: int
    kernel: str
    grid: str
    block: str
    duration_us: float | None = None
    dram_pct: float | None = None
    dram_read_mib: float | None = None
    dram_written_mib: float | None = None
    sm_pct: float | None = None
    tensor_pct: float | None = None
    issue_pct: float | None = None
    occupancy_pct: float | None = None
    l2_hit_pct: float | None = None
    registers_per_thread: int | None = None
    shared_bytes_per_block: int | None = None
    waves_per_sm: float | None = None
    stall: str | None = None
    stalled_warps_per_issue: float | None = None


class Profile(Strict, frozen=True, kw_only=True, tag_field="schema", tag="rlk.profile/1"):
    """A run of `python -m rlk.bench.profile`; `ncu` is the version of Nsight Compute."""

    origin: Origin
    ncu: str | None
    method: str
    interrupted: bool = False
    rows: list[ProfileRow]


class GateRow(Strict, frozen=True, kw_only=True):
    """How many records one judgment of one operator on one backend left with one status."""

    operator: str
    bits_version: int
    backend: str
    judgment: Judgment
    status: Status
    records: int


class GateSummary(Strict, frozen=True, kw_only=True, tag_field="schema", tag="rlk.gate-summary/2"):
    """Reports of `rlk gate`, counted."""

    origin: Origin
    tier: str
    seed: int
    passed: bool
    interrupted: bool = False
    rows: list[GateRow]


class InstallRow(Strict, frozen=True, kw_only=True):
    """What one operator gave in one installation: `digest` is of all its `results`."""

    operator: str
    way: str
    backend: str
    results: int
    digest: Digest


class Install(Strict, frozen=True, kw_only=True, tag_field="schema", tag="rlk.install/1"):
    """A run of `ci/install_gpu.py`; `wheels` are the digests of what was installed."""

    origin: Origin
    wheels: dict[str, Digest]
    interrupted: bool = False
    rows: list[InstallRow]


# What an origin says of the machine and of what is installed there.
MACHINE = ("device", "driver", "compute_capability", "python", "torch", "triton", "cuda")

Document: TypeAlias = Bench | Conventions | Survey | GateSummary | ExactGrad | Install | Profile


def origin(facts: dict | None = None, command: str | None = None) -> Origin:
    """The origin of a record made now by this process, or of one with these facts.

    Args:
        facts: what `rlk.environment.facts` gave; taken now if none.
        command: what was run; this process's arguments if none.
    Returns:
        The origin.
    """
    facts = facts or environment.facts()
    if command is None:
        # Where a machine keeps its files is nobody's matter.
        told = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
        command = shlex.join(["rlk", *told])
    packages = {name: Source(**source) for name, source in facts["packages"].items()}
    return Origin(command=command, packages=packages, **{name: facts[name] for name in MACHINE})
