# SPDX-License-Identifier: Apache-2.0
"""What became of the versions of each kernel: written by hand, as they are of many sources."""

from typing import Annotated, Literal

from msgspec import Meta

from rlk.records.document import Commit, Strict


class VersionTime(Strict, frozen=True, kw_only=True, omit_defaults=True):
    """Microseconds at one size: from and to which they were expected, and those measured.

    `beside` are times of others in the same run.
    """

    size: str
    dtype: str
    predicted_us: tuple[float, float] | None = None
    measured_us: float | None = None
    beside: dict[str, float] = {}


class KernelVersion(Strict, frozen=True, kw_only=True, omit_defaults=True):
    """One change of a kernel, timed at sizes of one operator; `commit` has it, if one does.

    `kept` is in the kernel, `superseded` has given way to a later version, `dropped` is a change
    that was taken back or never made.
    """

    operator: str
    kernel: str
    version: Annotated[int, Meta(ge=1)]
    change: str
    commit: Commit | None = None
    verdict: Literal["kept", "dropped", "superseded"]
    reason: str
    times: list[VersionTime] = []

    def __post_init__(self) -> None:
        measured = [time.measured_us is not None for time in self.times]
        if self.verdict != "dropped" and not (measured and all(measured)):
            raise ValueError(
                f"{self.kernel}: version {self.version}, {self.verdict}, must have measured_us at "
                f"each of its sizes, got {sum(measured)} of {len(measured)}"
            )


class KernelVersions(Strict, frozen=True, kw_only=True, tag_field="schema",
                     tag="rlk.kernel-versions/1"):  # fmt: skip
    """The versions of kernels on one device; `serves` says which operators launch a kernel."""

    device: str
    method: str
    serves: dict[str, list[str]]
    rows: list[KernelVersion]

    def __post_init__(self) -> None:
        last: dict[str, int] = {}
        for row in self.rows:
            if row.operator not in self.serves.get(row.kernel, ()):
                raise ValueError(f"serves must name {row.operator} for {row.kernel}, got none")
            if row.version <= last.get(row.kernel, 0):
                raise ValueError(
                    f"{row.kernel}: version must be above {last[row.kernel]}, the one before, got "
                    f"{row.version}"
                )
            last[row.kernel] = row.version
