# SPDX-License-Identifier: Apache-2.0
"""Nsight Compute: how it is asked, and what its CSV says of each launch of a kernel."""

import csv
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rlk.errors import RlkError

# Fields of a record, and the counters behind them: few, as each pass replays the kernel.
METRICS = {
    "duration_us": "gpu__time_duration.sum",
    "dram_pct": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_read_mib": "dram__bytes_read.sum",
    "dram_written_mib": "dram__bytes_write.sum",
    "sm_pct": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "issue_pct": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "occupancy_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "l2_hit_pct": "lts__t_sector_hit_rate.pct",
    "registers_per_thread": "launch__registers_per_thread",
    "shared_bytes_per_block": "launch__shared_mem_per_block",
    "waves_per_sm": "launch__waves_per_multiprocessor",
}
# Why warps wait: how many do for this reason, on average, whenever one issues.
STALLS = {
    reason: f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"
    for reason in (
        "long_scoreboard", "barrier", "mio_throttle", "math_pipe_throttle", "wait",
        "short_scoreboard", "lg_throttle", "membar",
    )
}  # fmt: skip
# The unit of a field by its ending, and how much of it each unit of ncu is. "byte/block" is "byte".
BYTES = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}
UNITS: dict[str, Mapping[str, float]] = {
    "_us": {
        "ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0,
        "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6,
    },
    "_mib": {unit: size / 2**20 for unit, size in BYTES.items()},
    "_pct": {"%": 1.0},
    "_bytes_per_block": BYTES,
}  # fmt: skip
WHOLE = ("registers_per_thread", "shared_bytes_per_block")
# What the child calls an NVTX range, with the number of its step.
STEP = "rlk-step-"
ERROR = "==ERROR=="


@dataclass(frozen=True)
class Launch:
    """One launch: the step that it belongs to, and values by the fields of a record."""

    step: int | None
    kernel: str
    grid: str
    block: str
    values: dict[str, float | str | None]


def version() -> str | None:
    """That of Nsight Compute.

    Raises:
        RlkError: there is none.
    """
    if shutil.which("ncu") is None:
        raise RlkError("profile: needs ncu, got none; install Nsight Compute")
    told = subprocess.run(["ncu", "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"Version (\d\S*)", told)
    return found[1] if found else None


def profiled(child: Sequence[str]) -> str:
    """The CSV of the kernels that a command launches while its profiler is on.

    Raises:
        RlkError: ncu has failed, or the command.
    """
    metrics = [*METRICS.values(), *STALLS.values()]
    while True:
        status, log, output = _run(metrics, child)
        errors = [line for line in (*log, *output) if line.startswith(ERROR)]
        unknown = [line for line in errors if "Failed to find metric" in line]
        # A GPU without a counter has no value of it, and those of the others.
        known = [m for m in metrics if not any(m.partition(".")[0] in line for line in unknown)]
        if len(known) == len(metrics):
            break
        metrics = known
    if status or errors or not any(map(_is_header, log)):
        print(*output, sep="\n", file=sys.stderr)
        # ncu's own error says more than that the command has failed, whose last line says why.
        own = [line for line in errors if "The application returned" not in line]
        last = (own or output or log or ["no word"])[-1].strip()
        raise RlkError(f"profile: ncu must finish, got exit status {status}: {last}")
    return "\n".join(log)


def _run(metrics: Sequence[str], child: Sequence[str]) -> tuple[int, list[str], list[str]]:
    """Exit status, lines of ncu, and lines of the command."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "ncu.csv"
        options = [
            "--csv", "--page", "raw", "--print-units", "base", "--print-kernel-base", "function",
            "--log-file", str(file), "--metrics", ",".join(metrics), "--nvtx",
            "--profile-from-start", "off", "--target-processes", "all",
            "--clock-control", "none", "--cache-control", "all", "--replay-mode", "kernel",
        ]  # fmt: skip
        done = subprocess.run(
            ["ncu", *options, *child],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        log = file.read_text(errors="replace") if file.exists() else ""
    return done.returncode, _told(log), _told(done.stdout)


def _told(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def launches(text: str) -> Iterator[Launch]:
    """Each launch that the CSV of `--page raw` lists: names, units, then a line for each.

    Raises:
        RlkError: it is no such CSV, or a value has an unknown unit.
    """
    lines = [line for line in _told(text) if not line.startswith("==")]
    start = next((i for i, line in enumerate(lines) if _is_header(line)), len(lines))
    names, units, *rows = [*csv.reader(lines[start:])] or [[], []]
    for row in (units, *rows):
        if len(row) != len(names) or "Kernel Name" not in names:
            raise RlkError(
                f"profile: ncu must list {len(names)} columns, Kernel Name among them, got "
                f"{','.join(row)[:80]!r}"
            )
    unit_of = dict(zip(names, units, strict=True))
    for row in rows:
        cells = dict(zip(names, row, strict=True))
        told = re.search(rf"{STEP}(\d+)", " ".join(row))
        yield Launch(
            step=int(told[1]) if told else None,
            kernel=cells["Kernel Name"],
            grid=_shape(cells.get("Grid Size", "")),
            block=_shape(cells.get("Block Size", "")),
            values=_values(cells, unit_of),
        )


def _is_header(line: str) -> bool:
    return line.startswith('"ID",')


def _shape(text: str) -> str:
    """(128, 1, 1) as 128x1x1."""
    return "x".join(re.findall(r"\d+", text))


def _values(cells: Mapping[str, str], units: Mapping[str, str]) -> dict[str, float | str | None]:
    values: dict[str, float | str | None] = {}
    for field, metric in METRICS.items():
        value = _number(cells.get(metric))
        if value is not None:
            value *= _scale(field, metric, units[metric])
            values[field] = round(value) if field in WHOLE else value
    stalls = {reason: _number(cells.get(metric)) for reason, metric in STALLS.items()}
    known = {reason: value for reason, value in stalls.items() if value is not None}
    if known:
        values["stall"] = max(known, key=lambda reason: known[reason])
        values["stalled_warps_per_issue"] = max(known.values())
    return values


def _scale(field: str, metric: str, unit: str) -> float:
    known = next((units for ending, units in UNITS.items() if field.endswith(ending)), None)
    if known is None:  # a count, which has no other unit
        return 1.0
    scale = known.get(unit.partition("/")[0])
    if scale is None:
        raise RlkError(f"profile: {metric} must be in {', '.join(known)}, got {unit!r}")
    return scale


def _number(text: str | None) -> float | None:
    """None for what ncu could not count: an absent column, n/a, nan."""
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None
