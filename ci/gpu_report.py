# SPDX-License-Identifier: Apache-2.0
"""What ci/gpu.sh needs from a machine, and what its parts found.

python ci/gpu_report.py require PART...      exit status 2 where a part cannot run
python ci/gpu_report.py table OUT_DIR PART...  one line for each part; 1 if anything is red
"""

import json
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlk.records import Bench

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "docs" / "records"
# Records are compared there; rlk is imported where a judgment needs it, to name what is missing.
sys.path.append(str(ROOT / "tools"))
# What a row of conventions says of a library that is absent.
NOT_INSTALLED = "not installed"
# What a machine may lack: hardware. Libraries that stand beside ours must be there.
PERMITTED_SKIP = "needs a second GPU"


def lacking(parts: Sequence[str]) -> str | None:
    """What this machine lacks, or None."""
    import importlib.util

    import torch

    from rlk.cuda import toolchain

    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU, got none"
    if toolchain.nvcc_missing() is not None:
        return str(toolchain.nvcc_missing())
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton, got none"
    for package in ("transformers", "diffusers") if "integration" in parts else ():
        if importlib.util.find_spec(package) is None:
            return f"needs the package {package}, got none; install it or leave out that part"
    if "profile" in parts and shutil.which("ncu") is None:
        return "needs ncu, got none; install Nsight Compute or leave out that part"
    if "sanitizer" in parts and shutil.which("compute-sanitizer") is None:
        return "needs compute-sanitizer, got none; install the CUDA toolkit or leave out that part"
    return None


def judge_tests(out: Path, name: str) -> tuple[bool, str]:
    """Whether tests ran and were skipped for the permitted reason alone."""
    suites = ElementTree.parse(out / f"{name}.xml").getroot()
    cases = list(suites.iter("testcase"))
    skips = [s.get("message", "") for case in cases for s in case.iter("skipped")]
    bad = sum(
        1 for case in cases if case.find("failure") is not None or case.find("error") is not None
    )
    others = [s for s in skips if PERMITTED_SKIP not in s]
    text = f"{len(cases)} tests, {bad} failed, {len(skips)} skipped"
    if others:
        text += f"; skip not permitted: {others[0]}"
    return bool(cases) and not bad and not others and len(skips) < len(cases), text


def judge_gates(out: Path, name: str) -> tuple[bool, str]:
    """Whether every record passed, by code that says it is the backend of the name on a GPU."""
    backend = name.split("-")[1]
    report = json.loads((out / f"{name}.json").read_text())
    records = report["records"]
    found = Counter(record["status"] for record in records)
    wrong = [
        record
        for record in records
        if record["provenance"]["actual"] != [backend]
        or not record["provenance"]["device"].startswith("cuda")
        or not all(record["provenance"]["binaries"])
    ]
    text = ", ".join(f"{count} {status}" for status, count in sorted(found.items()))
    text += f"; {len(wrong)} not run by {backend}" if wrong else ""
    return report["passed"] and not wrong and set(found) == {"passed"}, text


def judge_bench(out: Path, name: str) -> tuple[bool, str]:
    """Whether our backends were measured at every size, and no ratio of a kept record is lost."""
    import bench_limits

    from rlk import registry
    from rlk.records import Bench, decode

    record = decode((out / f"{name}.json").read_bytes(), name)
    if not isinstance(record, Bench):
        raise ValueError(f"{name}.json must be a record of rlk bench, got {type(record).__name__}")
    sizes = {(row.operator, row.size, row.layout, row.dtype) for row in record.rows}
    measured = [row.variant for row in record.rows if row.both_ratio is not None]
    complete = bool(sizes) and all(measured.count(b) == len(sizes) for b in bench_limits.OURS)
    first = {
        operator.name: next(b.name for b in operator.backends if b.name in bench_limits.OURS)
        for operator in registry.operators().values()
    }
    verdicts = bench_limits.verdicts(record, bench_limits.load(), first)
    lost = lost_speed(record)
    lines = [*(verdict.text for verdict in verdicts), *(f"lost    {line}" for line in lost)]
    (out / f"{name}.limits").write_text("".join(f"{line}\n" for line in lines))
    text = f"{len(sizes)} sizes, {len(record.rows)} rows on {record.origin.device}"
    text += f"; {bench_limits.counted(verdicts)}; {len(lost)} losses"
    return complete and not record.interrupted and not lost, text


def lost_speed(record: "Bench") -> list[str]:
    """Ratios that have grown since the records that are kept of this GPU."""
    from compare_records import losses

    from rlk.records import Bench, load_folder

    kept = load_folder(RECORDS).items()
    benches = [(path, found) for path, found in kept if isinstance(found, Bench)]
    return [
        f"{line}, {path}"
        for path, before in benches
        if before.origin.device == record.origin.device
        for line in losses(before, record)
    ]


def judge_survey(out: Path, name: str) -> tuple[bool, str]:
    """Whether nothing of ours depends on the batch; what others do is for the reader."""
    document = json.loads((out / f"{name}.json").read_text())
    ours = [row for row in document["rows"] if row.get("ours")]
    measured = [row["variant"] for row in ours if "rows_judged" in row]
    differing = [
        row["variant"]
        for row in ours
        if any(row.get("rows_alone", {}).values()) or any(row.get("batches_differing", {}).values())
    ]
    sizes = {(row["operator"], row["size"]) for row in ours}
    text = f"{len(sizes)} sizes, {len(document['rows'])} rows, {len(differing)} of ours differ"
    complete = bool(sizes) and all(measured.count(b) == len(sizes) for b in ("cuda", "triton"))
    return complete and not document["interrupted"] and not differing, text


def judge_conventions(out: Path, name: str) -> tuple[bool, str]:
    """Whether every other function was compared whose library is installed."""
    rows = json.loads((out / f"{name}.json").read_text())["rows"]
    lacks = [(row["other"], row.get("missing")) for row in rows]
    absent = sum(why == NOT_INSTALLED for _, why in lacks)
    failed = [f"{other}: {why}" for other, why in lacks if why not in (None, NOT_INSTALLED)]
    text = f"{len(rows)} rows, {absent} {NOT_INSTALLED}, {len(failed)} failed"
    text += f"; {failed[0]}" if failed else ""
    return absent < len(rows) and not failed, text


def judge_profile(out: Path, name: str) -> tuple[bool, str]:
    """Whether each of our backends of each operator that was asked for left a launch."""
    import bench_limits

    from rlk import registry
    from rlk.records import Profile, decode

    record = decode((out / f"{name}.json").read_bytes(), name)
    if not isinstance(record, Profile):
        raise ValueError(f"{name}.json must be of rlk.bench.profile, got {type(record).__name__}")
    asked = [registry.find(operator) for operator in name.split("-")[1:] or registry.operators()]
    wanted = {(o.name, b.name) for o in asked for b in o.backends if b.name in bench_limits.OURS}
    lacking = sorted(wanted - {(row.operator, row.backend) for row in record.rows})
    text = f"{len(record.rows)} launches by ncu {record.ncu} on {record.origin.device}"
    text += "".join(f"; no {backend} of {operator}" for operator, backend in lacking)
    return bool(wanted) and not lacking and not record.interrupted, text


def judge_starved(out: Path, name: str) -> tuple[bool, str]:
    """Whether the one variant that was asked for by name was tried at every size."""
    document = json.loads((out / f"{name}.json").read_text())
    found = Counter(row.get("verdict", "measured") for row in document["rows"])
    text = ", ".join(f"{count} {verdict}" for verdict, count in sorted(found.items()))
    return bool(found) and "not applicable" not in found and not document["interrupted"], text


def last_line(out: Path, name: str) -> str:
    """The last line of a part's log that says something."""
    lines = (out / f"{name}.log").read_text(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


# By the first word of a part's name: gates-cuda-rms_norm is judged as gates.
JUDGES: dict[str, Callable[[Path, str], tuple[bool, str]]] = {
    "tests": judge_tests,
    "integration": judge_tests,
    "gates": judge_gates,
    "bench": judge_bench,
    "survey": judge_survey,
    "starved": judge_starved,
    "conventions": judge_conventions,
    "profile": judge_profile,
}


def row(out: Path, name: str) -> tuple[bool, str, str, str]:
    """(passed, part, seconds, what it found)"""
    try:
        status, seconds = (out / f"{name}.status").read_text().split()
    except OSError:
        return False, name, "-", "did not finish"
    from rlk.errors import RlkError

    try:
        judge = JUDGES.get(name.split("-")[0], lambda out, name: (True, last_line(out, name)))
        passed, text = judge(out, name)
    except (OSError, ValueError, KeyError, RlkError, ElementTree.ParseError) as error:
        passed, text = False, f"{type(error).__name__}: {error}; {last_line(out, name)}"
    if status != "0" and passed:
        text = f"exit status {status}: {last_line(out, name)}"
    return passed and status == "0", name, seconds, text


def table(out: Path, names: Sequence[str]) -> int:
    """Print a line for each part; 0 if all passed."""
    rows = [row(out, name) for name in names]
    for name in names:
        told = out / f"{name}.limits"
        lines = told.read_text().splitlines() if told.exists() else []
        for line in lines:
            if not line.startswith("not measured"):
                print(line)
    for passed, name, seconds, text in rows:
        print(f"{'PASS' if passed else 'FAIL'}  {name:<36}{seconds:>5} s  {text[:200]}")
    return 0 if all(passed for passed, *_ in rows) else 1


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    if arguments[0] == "require":
        lack = lacking(arguments[1:])
        if lack is not None:
            print(f"gpu.sh: {lack}", file=sys.stderr)
        return 2 if lack else 0
    return table(Path(arguments[1]), arguments[2:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
