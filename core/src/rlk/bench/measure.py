# SPDX-License-Identifier: Apache-2.0
"""The measurements of one operator at one size: every variant beside the floor."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from msgspec.structs import replace

from rlk.arguments import dtype_name
from rlk.bench import bandwidth
from rlk.bench.timing import Capture, Time, eager_us, extra_bytes, host_us, interleaved
from rlk.bench.variants import Call, Variant, one_line, variants
from rlk.bench.work import Work
from rlk.errors import BackendError
from rlk.parts import cut_like, tensors_in
from rlk.records.document import FLOOR, BenchRow, Verdict, fastest_other

METHOD = "CUDA graph replay, tensors in rotation, variants interleaved, medians"
DEVICE = "cuda"
DIRECTIONS: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")
Data = Callable[[torch.Tensor], torch.Tensor]


def leading_zeros(dy: torch.Tensor) -> torch.Tensor:
    """Half of the rows, the first ones, without an upstream gradient."""
    half = len(dy) // 2
    return torch.cat([torch.zeros_like(dy[:half]), dy[half:]])


def scaled_rows(dy: torch.Tensor) -> torch.Tensor:
    """Rows apart by up to 80 binades."""
    shape = (len(dy), *(1 for _ in dy.shape[1:]))
    scale = torch.randint(-40, 41, shape, device=dy.device).float().exp2()
    return (dy.float() * scale).to(dy.dtype)


# Upstream gradients on which an exact sum has more to do.
HARD_DATA: dict[str, Data] = {"leading zeros": leading_zeros, "scaled rows": scaled_rows}


class Sets:
    """Sets of inputs and upstream gradients that take turns."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.inputs = [work.inputs(i, DEVICE) for i in range(work.sets)]
        self.upstream = [work.upstream(i, DEVICE) for i in range(work.sets)]

    def forward(self, call: Callable[..., Any], gradients: bool) -> Callable[[int], Any]:
        """A step that runs forward, with or without gradients to come."""

        def step(i: int) -> Any:
            with torch.set_grad_enabled(gradients):
                # Detached: what autograd keeps must not outlive the step.
                return [t.detach() for t in tensors_in(call(*self.inputs[i]))]

        return step

    def backward(
        self, call: Callable[..., Any], stream: Any, data: Data | None = None
    ) -> Callable[[int], Any]:
        """A step that runs backward alone, of forward calls made here."""
        with torch.cuda.stream(stream):
            outputs = [tensors_in(call(*inputs)) for inputs in self.inputs]
            wanted = [wanted_of(inputs) for inputs in self.inputs]
            given = [[data(dy) if data else dy for dy in u] for u in self.upstream]
            upstream = [cut_like(u, o) for u, o in zip(given, outputs, strict=True)]

        def step(i: int) -> Any:
            return torch.autograd.grad(outputs[i], wanted[i], upstream[i], retain_graph=True)

        return step


def wanted_of(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those that take gradients."""
    return [t for t in inputs if t.requires_grad]


def measure(work: Work, refused: Mapping[str, tuple[Verdict, str]] | None = None) -> list[BenchRow]:
    """One row for each variant: times, ratios, memory and the host; no time for who is refused."""
    stream = torch.cuda.Stream()
    floors: dict[str, bandwidth.Floor] = {d: bandwidth.floor(work, d, stream) for d in DIRECTIONS}
    least: dict[str, float] = {d: floors[d].us(work.least_bytes(d)) for d in DIRECTIONS}
    sets = Sets(work)
    captures: dict[tuple[str, str], Capture] = {}
    rows = []
    hard = bool(work.operator.parameters)
    for variant in variants(work.operator, work.scalars(), work.arguments, refused):
        row = _row(work, variant)
        rows.append(row)
        if variant.call is None:
            continue
        try:
            found = _captures(variant.call, sets, least, stream, hard and variant.ours)
            row |= _eager(variant.call, sets)
        except Exception as error:
            if variant.ours:
                raise
            # A peer that fails says so in its row; the others go on.
            lacking = isinstance(error, BackendError)
            reason = f"{error}" if lacking else one_line(error)
            row |= {"verdict": "not applicable" if lacking else "failed", "reason": reason}
            continue
        captures |= {(variant.name, what): capture for what, capture in found.items()}
    times = interleaved(captures)
    for row in rows:
        mine = {what: time for (name, what), time in times.items() if name == row["variant"]}
        row |= _ratios(mine, least, floors) if mine else {}
    return _against_fastest_other(
        [BenchRow(**row) for row in (_floor_row(work, floors, least), *rows)]
    )


def _captures(
    call: Call, sets: Sets, least: dict[str, float], stream: Any, hard_data: bool
) -> dict[str, Capture]:
    def capture(step: Callable[[int], Any], direction: str) -> Capture:
        return Capture(step, sets.work.sets, least[direction], stream)

    found = {
        "forward": capture(sets.forward(call, False), "forward"),
        "forward with gradients": capture(sets.forward(call, True), "forward"),
        "backward": capture(sets.backward(call, stream), "backward"),
    }
    for name, data in HARD_DATA.items() if hard_data else ():
        found[f"backward, {name}"] = capture(sets.backward(call, stream, data), "backward")
    return found


def _eager(call: Call, sets: Sets) -> dict[str, Any]:
    """Memory and times of calls without a graph."""

    def train(i: int = 0) -> Any:
        y = tensors_in(call(*sets.inputs[i]))
        upstream = cut_like(sets.upstream[i], y)
        gradients = torch.autograd.grad(y, wanted_of(sets.inputs[i]), upstream)
        return (*[t.detach() for t in y], *gradients)

    def infer(i: int = 0) -> Any:
        with torch.no_grad():
            return call(*sets.inputs[i])

    def record() -> Any:
        with torch.enable_grad():
            return call(*sets.inputs[0])

    return {
        "extra_mib": extra_bytes(train) / 2**20,
        "host_us": host_us(infer),
        "host_grad_us": host_us(record),
        "host_train_us": host_us(train),
        "eager_us": eager_us(infer, sets.work.sets),
        "eager_train_us": eager_us(train, sets.work.sets),
    }


def _row(work: Work, variant: Variant) -> dict[str, Any]:
    return {
        "operator": work.operator.name,
        "size": work.label,
        "layout": work.layout,
        "dtype": dtype_name(work.dtype),
        "variant": variant.name,
        "version": variant.version,
        "ours": variant.ours,
        "verdict": variant.verdict,
        "reason": variant.missing,
        "rows": work.sizes["T"],
    }


def _ratios(
    mine: dict[str, Time], least: dict[str, float], floors: dict[str, bandwidth.Floor]
) -> dict[str, Any]:
    """Times of a variant, their ratios to the floor, and the bandwidth that they amount to."""
    forward, backward = mine["forward"], mine["backward"]
    reached = {"forward": forward, "backward": backward}
    both = mine["forward with gradients"].median + backward.median
    return {
        "forward_us": forward.median,
        "forward_spread_us": forward.spread,
        "forward_ratio": forward.median / least["forward"],
        "backward_us": backward.median,
        "backward_spread_us": backward.spread,
        "both_us": both,
        "both_ratio": both / sum(least.values()),
        "terabytes_per_second": {
            direction: floors[direction].terabytes_per_second * least[direction] / time.median
            for direction, time in reached.items()
        },
        "hard_data": {
            what.partition(", ")[2]: time.median / backward.median
            for what, time in mine.items()
            if ", " in what
        },
    }


def _against_fastest_other(rows: list[BenchRow]) -> list[BenchRow]:
    other = fastest_other(rows)
    return [
        row
        if row.variant == FLOOR or not row.both_us or not other or not other.both_us
        else replace(row, peer_ratio=row.both_us / other.both_us)
        for row in rows
    ]


def _floor_row(
    work: Work, floors: dict[str, bandwidth.Floor], least: dict[str, float]
) -> dict[str, Any]:
    return {
        **_row(work, Variant(FLOOR, floors["forward"].kernel, None)),
        "forward_us": least["forward"],
        "forward_spread_us": floors["forward"].time.spread,
        "backward_us": least["backward"],
        "backward_spread_us": floors["backward"].time.spread,
        "both_us": sum(least.values()),
        "terabytes_per_second": {d: f.terabytes_per_second for d, f in floors.items()},
        "sets": work.sets,
    }
