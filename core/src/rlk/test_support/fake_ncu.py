# SPDX-License-Identifier: Apache-2.0
"""A program called ncu, and CSV as it writes it, for machines without Nsight Compute."""

import csv
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlk.bench.ncu import STEP

_IDENTITY = [
    "ID", "Process ID", "Process Name", "Host Name",
    "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg",
    "Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg",
    "Kernel Name", "Context", "Stream", "Block Size", "Grid Size", "Device", "CC",
]  # fmt: skip
_PROGRAM = """#!{python}
import pathlib, re, subprocess, sys

here, words = pathlib.Path(__file__).parent, sys.argv[1:]
if words == ["--version"]:
    print("NVIDIA (R) Nsight Compute Command Line Profiler")
    print("Version 2025.3.1.0 (build 36398880) (public-release)")
    raise SystemExit
with open(here / "calls", "a") as calls:
    print(*words, file=calls)
after = dict(zip(words, words[1:]))
log, status = (here / "told").read_text(), {status}
if {lacks!r} in after["--metrics"].split(","):
    log, status = "==ERROR== Failed to find metric {lacks}\\n", 1
pathlib.Path(after["--log-file"]).write_text(log)
if {runs}:
    start = words.index("--replay-mode") + 2
    status = subprocess.run(words[start:]).returncode
sys.stdout.write({output!r})
raise SystemExit(status)
"""


def fake_ncu(
    folder: Path, monkeypatch: Any, log: str, *, lacks: str = "", runs: bool = False, **told: Any
) -> Callable[[], list[str]]:
    """Put it in front of PATH.

    Args:
        folder: where it lies.
        monkeypatch: of pytest.
        log: what it writes to its log file.
        lacks: the metric that it does not know.
        runs: whether it runs its command, whose exit status it returns.
        told: `status` with which it exits, `output` that its command printed.
    Returns:
        A function that lists the arguments of each call.
    """
    folder = folder / "bin"
    folder.mkdir()
    (folder / "told").write_text(log)
    fields = {"status": 0, "output": "", **told}
    (folder / "ncu").write_text(
        _PROGRAM.format(python=sys.executable, lacks=lacks, runs=runs, **fields)
    )
    (folder / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return lambda: (folder / "calls").read_text().splitlines()


def raw_page(metrics: Mapping[str, str], *lines: Sequence[str], step: int = 7) -> str:
    """What `--csv --page raw` prints of launches of one kernel in one step.

    Args:
        metrics: their units.
        lines: a value of each metric, for each launch.
        step: the number in the name of the range.
    """
    text = io.StringIO()
    rows = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    rows.writerow([*_IDENTITY, *metrics])
    rows.writerow(["" for _ in _IDENTITY] + [*metrics.values()])
    for number, values in enumerate(lines):
        told = f'40  "<default domain>:{STEP}{step}:none:none:none:none:none:none" '
        place = ["row_kernel", "1", "7", "(128, 1, 1)", "(2048, 3, 1)", "0", "9.0"]
        rows.writerow([number, "40", "python3.12", "127.0.0.1", told, "", *place, *values])
    return (
        "==PROF== Connected to process 40 (/usr/bin/python3.12)\n"
        '==PROF== Profiling "row_kernel" - 0: 0%....50%....100% - 11 passes\n'
        f"==PROF== Disconnected from process 40\n{text.getvalue()}"
    )
