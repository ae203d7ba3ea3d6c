# SPDX-License-Identifier: Apache-2.0
"""What limits our kernels: counters of Nsight Compute for one forward and one backward.

    python -m rlk.bench.profile [OP...] [--rows N]... [--jobs N] [--json FILE]

Every declared workload in BF16, on each of our backends that runs here. One process of ncu runs
this module again as its child, which puts each step into an NVTX range of its number.
"""

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from rlk.arguments import dtype_name
from rlk.bench import ncu
from rlk.bench.measure import DEVICE, DIRECTIONS, wanted_of
from rlk.bench.variants import OURS, Call, public_call
from rlk.bench.work import Work, works
from rlk.cli import select
from rlk.cli.console import complain, console, table
from rlk.errors import BackendError, PlatformError, RlkError
from rlk.parts import cut_like, tensors_in
from rlk.records import Profile, ProfileRow, origin, write
from rlk.report import tables

METHOD = "one warm launch each, kernel replay, caches flushed, free clocks, forward with gradients"
Measured = tuple[Work, str]


def planned(names: Sequence[str], rows: Sequence[int]) -> list[Measured]:
    """Every workload with each of our backends that is declared, whether or not it runs here.

    Steps are numbered by it, in the child as here: numbers must not depend on what a process finds.
    """
    operators = select.named(names) if names else select.every()
    return [
        (work, backend)
        for operator in operators
        for work in works(operator, torch.bfloat16, rows)
        for backend in OURS
        if operator.backend(backend) is not None
    ]


def _call(work: Work, backend: str) -> Call | None:
    """Our public function, or None where the backend cannot run."""
    try:
        return public_call(work.operator, backend, {**work.scalars(), **work.arguments})
    except (BackendError, PlatformError):
        return None


def steps(work: Work, call: Call) -> tuple[Callable[[], Any], ...]:
    """One forward that records gradients, and one backward."""
    inputs, upstream = work.inputs(0, DEVICE), work.upstream(0, DEVICE)
    outputs = tensors_in(call(*inputs))
    wanted, given = wanted_of(inputs), cut_like(upstream, outputs)

    def backward() -> Any:
        return torch.autograd.grad(outputs, wanted, given, retain_graph=True)

    return lambda: call(*inputs), backward


def run_child(plan: Sequence[Measured], share: tuple[int, int]) -> None:
    """Run each step of a share of the plan twice, the second time for ncu."""
    # Ranges are of a thread, and backward would run in another one.
    with torch.autograd.set_multithreading_enabled(False):
        for number, (work, backend) in enumerate(plan):
            # Neighbours are one workload on each backend, of which Triton alone compiles here.
            mine = number // len(OURS) % share[1] == share[0]
            call = _call(work, backend) if mine else None
            if call is None:
                continue
            for place, step in enumerate(steps(work, call)):
                step()
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
                torch.cuda.nvtx.range_push(f"{ncu.STEP}{number * len(DIRECTIONS) + place}")
                step()
                torch.cuda.synchronize()
                torch.cuda.nvtx.range_pop()
                torch.cuda.profiler.stop()
            torch.cuda.empty_cache()


def warm(child: Sequence[str], jobs: int) -> None:
    """Let processes side by side compile what ncu's one child would compile in turn."""
    if jobs > 1:
        running = [
            # A step that fails says so under ncu.
            subprocess.Popen([*child, "--share", str(i), str(jobs)], stderr=subprocess.DEVNULL)
            for i in range(jobs)
        ]
        for process in running:
            process.wait()


def rows_of(plan: Sequence[Measured], found: Sequence[ncu.Launch]) -> Iterator[ProfileRow]:
    """A row for each launch, at its place in its step.

    Raises:
        RlkError: a launch belongs to no step.
    """
    counts: Counter[int] = Counter()
    for launch in found:
        step = -1 if launch.step is None else launch.step
        number, place = divmod(step, len(DIRECTIONS))
        if not 0 <= number < len(plan):
            raise RlkError(
                f"profile: a launch must be in a step of {len(DIRECTIONS) * len(plan)}, got "
                f"{launch.kernel} in step {launch.step}"
            )
        work, backend = plan[number]
        counts[step] += 1
        yield ProfileRow(
            operator=work.operator.name,
            size=work.label,
            layout=work.layout,
            dtype=dtype_name(work.dtype),
            backend=backend,
            direction=DIRECTIONS[place],
            launch=counts[step],
            kernel=launch.kernel,
            grid=launch.grid,
            block=launch.block,
            **launch.values,  # type: ignore[arg-type]
        )


def missing(plan: Sequence[Measured], found: Sequence[ncu.Launch]) -> list[str]:
    """A clause for each step that runs here and has no launch."""
    there = {launch.step for launch in found}
    return [
        f"{work.operator.name} {work.label} {work.layout} {backend} {direction}"
        for number, (work, backend) in enumerate(plan)
        if _call(work, backend) is not None
        for place, direction in enumerate(DIRECTIONS)
        if number * len(DIRECTIONS) + place not in there
    ]


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m rlk.bench.profile", description=__doc__)
    parser.add_argument("operators", nargs="*", metavar="OP", help="all if none")
    parser.add_argument("--rows", type=int, action="append", default=[], help="further row counts")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile first")
    parser.add_argument("--json", type=Path, help="file for the record")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    options = parsed(arguments)
    if not torch.cuda.is_available():
        complain("profile: the machine must have an NVIDIA GPU, got none")
        return 2
    told = [*options.operators, *(w for count in options.rows for w in ("--rows", str(count)))]
    try:
        if options.child:
            run_child(planned(options.operators, options.rows), tuple(options.share))
            return 0
        version, plan = ncu.version(), planned(options.operators, options.rows)
        if not any(_call(work, backend) for work, backend in plan):
            raise RlkError(f"profile: a backend of {', '.join(OURS)} must run here, got none")
        child = [sys.executable, "-m", "rlk.bench.profile", *told, "--child"]
        warm(child, options.jobs)
        found = list(ncu.launches(ncu.profiled(child)))
        rows = list(rows_of(plan, found))
    except RlkError as error:
        complain(str(error))
        return 2
    for name in dict.fromkeys(row.operator for row in rows):
        for heading, cells in tables.limits([row for row in rows if row.operator == name]):
            console().print(table(f"{name} {heading}", tables.LIMITS, cells))
    lacking = missing(plan, found)
    for step in lacking:
        complain(f"profile: {step} must launch a kernel, got none")
    if options.json is not None:
        made = origin(command=" ".join(["python -m rlk.bench.profile", *told]))
        record = Profile(origin=made, ncu=version, method=METHOD, rows=rows)
        write(options.json, replace(record, interrupted=bool(lacking)))
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
