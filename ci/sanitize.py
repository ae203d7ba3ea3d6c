# SPDX-License-Identifier: Apache-2.0
"""Run every kernel on small awkward tensors, under a tool of compute-sanitizer.

python ci/sanitize.py TOOL      starts itself below compute-sanitizer --tool TOOL
python ci/sanitize.py --cases   only runs the cases

--share 2/3 is every third case from the second on.

Prints the number of cases; every result is compared with golden, so that a clean run is also a
right one.
"""

import argparse
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rlk import contract, interpreter
from rlk.compare import assert_same_bits
from rlk.gates.inputs import default_scalars, edge_sizes, fixture, label
from rlk.operator import FLOATS, Operator

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Exit status of the tool when it found something.
FOUND = 9
ROWS = 5
# Row lengths by what serves them: part of a chunk, one and a bit, a block of 256 threads and of
# 1024, longer rows; with 16-byte words where 8 divides the length, and without.
LENGTHS = (13, 24, 200, 264, 300, 2056, 2061, 8200)
# Triton's whole rows, in a chunk and beyond; 256 fill a program and need no mask of columns, those
# of over 4096 go chunk by chunk. Products of so many columns would take minutes.
TRITON_LENGTHS = (13, 24, 256, 264, 4104)
TRITON_LENGTHS_OF_PRODUCTS = (13, 24, 264)
SUM_LENGTHS = (1, 24, 300)
LAYOUTS = ("contiguous", "shifted", "strided")
# Rows of a, rows of b and K by the tile of the chain that serves them, parts of tiles included;
# the last with rows that TMA reads whichever axis is contiguous.
PRODUCTS = (
    {"M": 5, "N": 40, "K": 200},
    {"M": 70, "N": 33, "K": 24},
    {"M": 300, "N": 136, "K": 160},
    {"M": 264, "N": 136, "K": 72},
)
# A kernel whose barriers count bytes of TMA and whose reader is wgmma: racecheck follows neither.
UNCHECKED_FOR_RACES = "chain_wgmma"
# Of the cases, for processes side by side.
SHARES = ("1/1", "1/3", "2/3", "3/3")
# What the acceptance of the GPU work asks for.
FEWEST_CASES = 52


@dataclass(frozen=True)
class Case:
    """One call forward and backward, or of a primitive's public steps."""

    name: str
    backend: str
    dtype: str
    sizes: Mapping[str, int]
    layout: str
    operator: Operator | None = None
    scalars: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.backend} {self.dtype} {label(self.sizes)} {self.layout}"


def triton_lengths(operator: Operator) -> tuple[int, ...]:
    """The lengths at which an operator's Triton kernels run."""
    product = operator.reduces_by("mma_chain")
    return TRITON_LENGTHS_OF_PRODUCTS if product else TRITON_LENGTHS


def cases(operators: list[Operator], backends: tuple[str, ...]) -> Iterator[Case]:
    """Every kernel in every dtype and layout; each size has one layout or two, and a choice."""
    for backend, operator in itertools.product(backends, operators):
        lengths = LENGTHS if backend == "cuda" else triton_lengths(operator)
        sizes = edge_sizes(operator, lengths)[-len(lengths) :]
        choices = chosen(operator)
        for (at, dtype), (place, size) in itertools.product(enumerate(FLOATS), enumerate(sizes)):
            choice = choices[(at + place) % len(choices)]
            # Contiguous always: only there do kernels use 16-byte words.
            wanted = {turn(at + place), *(["contiguous"] if backend == "cuda" else [])}
            for flags, layout in itertools.product(flagged(operator), sorted(wanted)):
                scalars = {**default_scalars(operator), **flags, **choice}
                yield Case(operator.name, backend, dtype, size, layout, operator, scalars)
    sums = [("exact_sum", {"N": length}) for length in SUM_LENGTHS]
    products = [("mma_chain", product) for product in PRODUCTS]
    for backend, dtype, several in itertools.product(backends, FLOATS, (sums, products)):
        for place, (name, size) in enumerate(several):
            yield Case(name, backend, dtype, size, turn(place))


def turn(place: int) -> str:
    """The layout of a place: three in a row have all."""
    return LAYOUTS[place % len(LAYOUTS)]


def flagged(operator: Operator) -> list[dict[str, bool]]:
    """Every setting of the flags: kernels of their own."""
    names = [s.name for s in operator.free_scalars if isinstance(s.default, bool)]
    settings = itertools.product((True, False), repeat=len(names))
    return [dict(zip(names, values, strict=True)) for values in settings]


def chosen(operator: Operator) -> list[dict[str, str]]:
    """Every choice of the scalars that name their values."""
    named = {s.name: s.choices for s in operator.free_scalars if s.choices}
    return [dict(zip(named, values, strict=True)) for values in itertools.product(*named.values())]


def arranged(tensor: torch.Tensor, layout: str, device: str) -> torch.Tensor:
    """A copy on the device with these strides, made by one copy of memory and no kernel."""
    if layout == "contiguous":
        return tensor.contiguous().to(device)
    step = 2 if layout == "strided" else 1
    memory = torch.zeros(step * tensor.numel() + 1, dtype=tensor.dtype)
    sizes, strides = tensor.shape, [step * s for s in tensor.contiguous().stride()]
    memory.as_strided(sizes, strides, 1).copy_(tensor)
    return memory.to(device).as_strided(sizes, strides, 1)


def run_operator(case: Case, operator: Operator, device: str) -> None:
    """Forward and backward with all gradients and with the exact sums alone."""
    from rlk.execution import Execution

    seed = sum(case.sizes.values())
    options = {"sizes": case.sizes, "scalars": case.scalars}
    batch = fixture(operator, case.dtype, rows=ROWS, seed=seed, **options)
    execution = Execution(operator)

    def results(backend: str, device: str, layout: str) -> list[torch.Tensor]:
        tensors = [arranged(t, layout, device) for t in batch.inputs.values()]
        upstream = [arranged(t, layout, device) for t in batch.upstream.values()]
        scalars: tuple[Any, ...] = tuple(batch.scalars.values())
        found = list(execution.forward(*tensors, *scalars, backend))
        outputs, saved = found[: len(operator.outputs)], found[len(operator.outputs) :]
        kept = operator.kept(tensors, outputs)
        alone = [f"d{t.name}" in operator.exact_sums for t in operator.returned_gradients]
        for needs in ([True] * len(alone), alone):
            found += execution.backward(*upstream, *kept, *saved, *scalars, *needs, backend)
        return found

    # Where no CPU has the bits, another backend has.
    others = [b.name for b in operator.backends if b.name != case.backend]
    reference = ("golden", "cpu") if "golden" in others else (others[0], device)
    compare(case, results(case.backend, device, case.layout), results(*reference, case.layout))


def run_exact_sum(case: Case, device: str) -> None:
    """Add, merge and round."""
    from rlk.reduce import exact_sum
    from rlk.reduce.exact_sum.golden import FORMATS

    length = case.sizes["N"]
    generator = torch.Generator().manual_seed(length)
    shape = (700, length)
    scale = torch.randint(-30, 31, shape, generator=generator).float().exp2()
    rows = (torch.randn(shape, generator=generator) * scale).to(getattr(torch, case.dtype))

    def results(backend: str, device: str) -> list[torch.Tensor]:
        there = arranged(rows, case.layout, device)
        empty = torch.zeros(exact_sum.STATE_ROWS, length, dtype=torch.int64).to(device)
        state = exact_sum.add_rows(empty, there, backend=backend)
        rounded = [exact_sum.round(state, dtype, backend=backend) for dtype in FORMATS]
        return [state, exact_sum.merge(state, empty, backend=backend), *rounded]

    compare(case, results(case.backend, device), results("golden", "cpu"))


def run_mma_chain(case: Case, device: str) -> None:
    """Products of integers, which golden forms with the same bits, along K and along rows."""
    from rlk.reduce import mma_chain
    from rlk.reduce.mma_chain.hard_cases import integers

    given = integers(*case.sizes.values(), getattr(torch, case.dtype))

    def results(backend: str, device: str) -> list[torch.Tensor]:
        bias, initial = (arranged(t, case.layout, device) for t in (given.bias, given.initial))
        return [
            mma_chain.product(
                turn(arranged(turn(given.a), case.layout, device)),
                turn(arranged(turn(given.b), case.layout, device)),
                bias=bias, initial=initial, dtype=torch.float32, backend=backend,
            )
            for turn in (torch.Tensor.detach, torch.Tensor.t)
        ]  # fmt: skip

    compare(case, results(case.backend, device), results("golden", "cpu"))


PRIMITIVES = {"exact_sum": run_exact_sum, "mma_chain": run_mma_chain}


def compare(case: Case, actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Raise unless all results agree in every bit, or in value where golden has no more."""
    products = _products(case.operator) if case.operator else []
    for place, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if place < len(products) and products[place]:
            _require_near(case, place, a.cpu(), e)
            continue
        assert_same_bits(a.cpu(), e.cpu(), f"{case}: result {place}")


def _require_near(case: Case, place: int, actual: torch.Tensor, expected: torch.Tensor) -> None:
    bound = contract.load().tolerance("gradient_accuracy", "product", expected.dtype)
    limit = bound.atol + bound.rtol * expected.double().abs()
    if not bool(((actual.double() - expected.double()).abs() <= limit).all()):
        raise AssertionError(f"{case}: result {place} is beyond the contract")


def _products(operator: Operator) -> list[bool]:
    """Which of the results of `run_operator` golden has in value alone."""
    gradients = [f"d{t.name}" for t in operator.returned_gradients]
    results = [t.name for t in operator.outputs + operator.saved] + 2 * gradients
    judged_by_golden = operator.backend("golden") is not None
    return [judged_by_golden and bool(operator.equal_among(name)) for name in results]


def run_cases(backends: tuple[str, ...], device: str, share: str) -> int:
    """Run all cases, or a share of them; the exit status."""
    from rlk.cli import select

    # A variant that shares the kernels of its base would run its lengths twice.
    runnable = (o for o in select.every() if device == "cuda" or o.backend("golden"))
    kernels = {o.backends: o for o in runnable}
    planned = list(cases(list(kernels.values()), backends))
    place, shares = map(int, share.split("/"))
    mine = planned[place - 1 :: shares]
    for case in mine:
        if case.operator is None:
            PRIMITIVES[case.name](case, device)
        else:
            run_operator(case, case.operator, device)
    if len(planned) < FEWEST_CASES:
        print(f"sanitize: at least {FEWEST_CASES} cases must run, got {len(planned)}")
        return 1
    print(f"{len(mine)} of {len(planned)} cases on {', '.join(backends)}", flush=True)
    return 0


def below(tool: str, share: str) -> int:
    """Run the cases below a tool of compute-sanitizer; the exit status."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        print("sanitize: compute-sanitizer must be installed, got none", file=sys.stderr)
        return 2
    environment = dict(os.environ)
    if tool in ("memcheck", "initcheck"):
        # The cache would hide accesses beyond a tensor, and bytes that nobody wrote.
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
    # What our launches return is checked by themselves; children such as nvcc are not the subject.
    command += ["--target-processes", "application-only"]
    if tool == "racecheck":
        command += ["--kernel-name-exclude", f"kns={UNCHECKED_FOR_RACES}"]
    if tool == "memcheck":
        command += ["--report-api-errors", "no"]
    done = subprocess.run(
        [*command, sys.executable, __file__, "--cases", "--share", share],
        env=environment,
        check=False,
    )
    return done.returncode


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool", nargs="?", choices=TOOLS)
    parser.add_argument("--cases", action="store_true", help="run here, below no tool")
    parser.add_argument("--backend", action="append", help="cuda and triton if none")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--share", default="1/1", choices=SHARES)
    options = parser.parse_args()
    if not options.cases:
        return below(options.tool or parser.error("a tool or --cases must be given"), options.share)
    interpreter.enable_without_gpu()
    return run_cases(tuple(options.backend or ("cuda", "triton")), options.device, options.share)


if __name__ == "__main__":
    sys.exit(main())
