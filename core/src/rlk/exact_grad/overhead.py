# SPDX-License-Identifier: Apache-2.0
"""What exact accumulation costs on a GPU, beside rounding in every backward.

    python -m rlk.exact_grad.overhead [--json FILE]

Every operator with exact parameter gradients, at its declared workloads in BF16. A step is one
backward that adds to the gradients of parameters, rounded or as exact states; both are replayed as
CUDA graphs and take turns. What ends a block, once in a training step, is timed for itself. Exit
status 1 if at 262144 rows of 128 a backward takes over 3 % longer.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlk.arguments import dtype_name
from rlk.bench.timing import Capture, host_us, interleaved, peak_bytes
from rlk.bench.work import Work, works
from rlk.cli import select
from rlk.cli.console import complain
from rlk.exact_grad.carrier import new_carrier, states_of
from rlk.operator import Operator
from rlk.publish import PUBLISHED
from rlk.records import ExactGrad, ExactGradRow, origin, write
from rlk.reduce import exact_sum

# Rows and columns at which the overhead is judged, and the most that it may be.
JUDGED, MOST = (262144, 128), 0.03
# 4 TB/s, about what an H200 moves: only to choose how many calls a graph holds.
BYTES_PER_US = 4e6


class Accumulation:
    """The same calls, whose parameter gradients are rounded in each, or added as exact states."""

    def __init__(self, work: Work, device: str) -> None:
        self._work = work
        self._inputs = [work.inputs(i, device) for i in range(work.sets)]
        self._upstream = [work.upstream(i, device) for i in range(work.sets)]
        self._places = _places(work.operator, "parameter")
        parameters = [self._inputs[0][place] for place in self._places]
        for inputs in self._inputs:
            for place, parameter in zip(self._places, parameters, strict=True):
                inputs[place] = parameter
        self.carriers = [new_carrier(p) for p in parameters]
        # What both ways add to.
        self.gradients = [torch.zeros_like(p) for p in parameters]
        self.states = [torch.zeros_like(c) for c in self.carriers]

    def rounding(self) -> Callable[[int], Any]:
        """A step as in a training loop without accumulator."""
        return self._step(())

    def exact(self) -> Callable[[int], Any]:
        """A step as in a block of an accumulator: parameters get zeros, carriers states."""
        return self._step(self.carriers)

    def finish(self) -> list[torch.Tensor]:
        """What the end of a block does on one rank."""
        for carrier, state in zip(self.carriers, self.states, strict=True):
            carrier.grad = state
        dtypes = [gradient.dtype for gradient in self.gradients]
        rounded = exact_sum.round(states_of(self.carriers), dtypes[0])
        return list(rounded.split([g.numel() for g in self.gradients]))

    @property
    def state_bytes(self) -> int:
        """What the accumulator keeps: carriers and their gradients."""
        return sum(2 * c.numel() * c.element_size() for c in self.carriers)

    def _step(self, carriers: Sequence[torch.Tensor]) -> Callable[[int], Any]:
        operator = self._work.operator
        call, scalars = PUBLISHED[operator.name], self._work.scalars()
        outputs = [call(inputs, scalars, None, tuple(carriers)) for inputs in self._inputs]
        row_places = _places(operator, "row")
        targets = [*self.gradients, *(self.states if carriers else ())]

        def step(i: int) -> Any:
            rows = [self._inputs[i][place] for place in row_places]
            summed = [*(self._inputs[i][place] for place in self._places), *carriers]
            found = torch.autograd.grad(
                outputs[i], [*rows, *summed], self._upstream[i], retain_graph=True
            )
            # As autograd adds to `.grad`.
            for target, gradient in zip(targets, found[len(rows) :], strict=True):
                target.add_(gradient)
            return found[: len(rows)]

        return step


def _places(operator: Operator, gradient: str) -> list[int]:
    return [i for i, t in enumerate(operator.inputs) if t.gradient == gradient]


def measure(work: Work) -> ExactGradRow:
    """One row of the record."""
    stream = torch.cuda.Stream()
    least = work.least_bytes("backward") / BYTES_PER_US
    ways = Accumulation(work, "cuda")
    # Its tensors are being made on another stream: forward would read what memory held before.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        steps = {"rounding": ways.rounding(), "exact": ways.exact()}
        peaks = {name: peak_bytes(partial(step, 0))[0] for name, step in steps.items()}
    captures = {name: Capture(step, work.sets, least, stream) for name, step in steps.items()}
    times = interleaved(captures)
    torch.cuda.synchronize()
    return ExactGradRow(
        operator=work.operator.name,
        size=work.label,
        rows=work.sizes["T"],
        columns=math.prod(ways.gradients[0].shape),
        dtype=dtype_name(work.dtype),
        rounding_us=times["rounding"].median,
        rounding_spread_us=times["rounding"].spread,
        exact_us=times["exact"].median,
        exact_spread_us=times["exact"].spread,
        overhead=times["exact"].median / times["rounding"].median - 1,
        end_of_block_host_us=host_us(ways.finish),
        state_bytes=ways.state_bytes,
        rounding_peak_bytes=peaks["rounding"],
        exact_peak_bytes=peaks["exact"],
        end_of_block_peak_bytes=peak_bytes(ways.finish)[0],
    )


def judge(rows: Sequence[ExactGradRow]) -> list[str]:
    """What is wrong with a record: a size that is missing, or an overhead above the limit."""
    judged = [row for row in rows if (row.rows, row.columns) == JUDGED]
    if not judged:
        return [f"no operator was measured at {JUDGED[0]} rows of {JUDGED[1]}"]
    return [
        f"{row.operator} {row.size}: a backward takes {row.overhead:.1%} longer, at most "
        f"{MOST:.0%} are allowed"
        for row in judged
        if not row.overhead <= MOST
    ]


def line(row: ExactGradRow) -> str:
    """What is printed of a row."""
    return (
        f"{row.operator:24}{row.size:>16}  {row.rounding_us:9.1f} us rounding  "
        f"{row.exact_us:9.1f} us exact  {row.overhead:+7.2%}  end of block "
        f"{row.end_of_block_host_us:.0f} us of the host  state {row.state_bytes} bytes  peak "
        f"{row.rounding_peak_bytes} bytes rounding, {row.exact_peak_bytes} exact, "
        f"{row.end_of_block_peak_bytes} at the end of a block"
    )


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m rlk.exact_grad.overhead", description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the record")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        complain("overhead: the machine must have an NVIDIA GPU, got none")
        return 2
    rows = []
    for operator in select.every():
        for work in works(operator, torch.bfloat16, ()) if operator.exact_parameters else ():
            rows.append(measure(work))
            torch.cuda.empty_cache()
            print(line(rows[-1]), flush=True)
    wrong = judge(rows)
    if options.json is not None:
        made = origin(command="python -m rlk.exact_grad.overhead")
        write(options.json, ExactGrad(origin=made, wrong=wrong, rows=rows))
    print("\n".join(wrong) or f"at most {MOST:.0%} at {JUDGED[0]} rows of {JUDGED[1]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
