# SPDX-License-Identifier: Apache-2.0
"""What a workload manifest says, as strict frozen structs; `rlk.manifest` reads and checks it."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from rlk.errors import WorkloadError

Name = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
RecordedSha256 = Annotated[str, Meta(pattern="^([0-9a-f]{64}|not_recorded)$")]
Revision = Annotated[str, Meta(pattern="^[0-9a-f]{40}$")]
Availability = Literal["declared", "missing_required"]
Transform = Literal["canonical", "chunked", "singleton", "permuted", "left_padded", "right_padded"]


class Frozen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Strict and immutable: an unknown key is an error."""


class Model(Frozen, frozen=True):
    """Which model, at which commit."""

    id: Name
    revision: Revision


class Architecture(Frozen, frozen=True):
    """The model's sizes; `fingerprint` is the SHA-256 of `values` as sorted compact JSON."""

    values: dict[str, int | float | str]
    fingerprint: Sha256


class Shard(Frozen, frozen=True):
    """One file of weights; its facts may be `not_recorded`."""

    name: Name
    sha256: RecordedSha256
    size: Count | Literal["not_recorded"]


class Weights(Frozen, frozen=True):
    """The shards, the bytes of all files, and the tensor bytes their index states."""

    shard_count: Count
    files_total_bytes: Count
    index_total_bytes: Count
    shards: tuple[Shard, ...]


class Execution(Frozen, frozen=True):
    """How the operators run. float16 is no execution dtype of a workload."""

    dtypes: Annotated[tuple[Literal["bfloat16", "float32"], ...], Meta(min_length=1)]
    accumulation: Literal["float32"]
    tf32: Literal["off"]
    fast_math: Literal["off"]


class Stochastic(Frozen, frozen=True):
    """Nothing is drawn while judging."""

    seed: Annotated[int, Meta(ge=0)]
    dropout: Annotated[float, Meta(ge=0, le=0)]


class Roles(Frozen, frozen=True):
    """What a candidate is compared with, per kind of judgment."""

    accuracy: Literal["oracle"]
    bits: Literal["golden"]
    invariance: Literal["candidate"]


class Chain(Frozen, frozen=True):
    """From outputs to gradients: how the loss reduces, and the comparison roles."""

    loss_reduction: Literal["sum", "mean"]
    comparison_roles: Roles


class Provenance(Frozen, frozen=True):
    """How far the evidence reaches: `scope` lists the operators it is about."""

    full_model_evidence: bool
    weights: Literal["synthetic", "checkpoint"]
    scope: Annotated[tuple[Name, ...], Meta(min_length=1)]
    boundary: Name


class Site(Frozen, frozen=True):
    """Where the model calls an operator.

    `*_from` names the architecture value behind a number; only a 1 needs none.
    """

    name: Name
    width: Count
    width_from: Name
    rows_per_token: Count
    instances: Count
    rows_per_token_from: Name | UnsetType = UNSET
    instances_from: Name | UnsetType = UNSET


class Backends(Frozen, frozen=True):
    """Which backends the workload has, and which it needs but lacks."""

    golden: Availability
    triton: Availability
    cuda: Availability


class ClaimedOperator(Frozen, frozen=True):
    """An operator, the scalars the model passes, and its sites."""

    name: Name
    scalars: dict[str, float | str | bool]
    backends: Backends
    sites: Annotated[tuple[Site, ...], Meta(min_length=1)]


class Fixture(Frozen, frozen=True):
    """A packed batch of samples."""

    id: Name
    sample_lengths: Annotated[tuple[Count, ...], Meta(min_length=1)]
    tokens: Count


class Case(Frozen, frozen=True):
    """A transform of a fixture: which samples, in which order, cut or padded how."""

    id: Name
    fixture: Name
    transform: Transform
    samples: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)]
    chunk: Count | UnsetType = UNSET
    pad_to: Count | UnsetType = UNSET


class Manifest(Frozen, frozen=True):
    """A checked workload manifest. `sha256` covers the document without that key."""

    schema: Literal["rlk/workload-1"]
    workload_id: Name
    model: Model
    architecture: Architecture
    weights: Weights
    execution: Execution
    stochastic: Stochastic
    chain: Chain
    provenance: Provenance
    operators: Annotated[tuple[ClaimedOperator, ...], Meta(min_length=1)]
    fixtures: Annotated[tuple[Fixture, ...], Meta(min_length=1)]
    cases: Annotated[tuple[Case, ...], Meta(min_length=1)]
    sha256: Sha256

    def operator(self, name: str) -> ClaimedOperator:
        """What the manifest says about one operator.

        Args:
            name: the operator's name.
        Returns:
            Its scalars, backends and sites.
        Raises:
            WorkloadError: the manifest does not cover it.
        """
        for entry in self.operators:
            if entry.name == name:
                return entry
        covered = ", ".join(entry.name for entry in self.operators)
        raise WorkloadError(f"manifest: $.operators must cover {name}, got {covered}")
