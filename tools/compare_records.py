# SPDX-License-Identifier: Apache-2.0
"""What changed between two records of one kind: python tools/compare_records.py A B

Counts, verdicts and errors must be equal; times may differ by noise. Prints a line for each
difference; exit status 1 if there is one, 2 if the records cannot be compared. Other machines and
sources are named, and are no difference by themselves.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlk.errors import RlkError
from rlk.records import FLOOR, Bench, Document, ExactGrad, Profile, decode

# What tells one row from another, by kind.
KEYS = {
    "rlk.bench/2": ("operator", "size", "layout", "dtype", "variant"),
    "rlk.conventions/1": ("operator", "size", "dtype", "rounding", "other"),
    "rlk.survey/1": ("operator", "size", "dtype", "variant"),
    "rlk.exact-grad/1": ("operator", "size", "dtype"),
    "rlk.gate-summary/2": ("operator", "backend", "judgment", "status"),
    "rlk.install/1": ("operator", "way"),
    "rlk.profile/1": ("operator", "size", "layout", "dtype", "backend", "direction", "launch"),
}
# A median moves less than 5 % between runs of one source; three spreads where those are wider.
NOISE, SPREADS = 0.05, 3.0
# A ratio that grows by a tenth, and by more than the noise of both runs, is a loss.
LOSS = 0.10
# Microseconds: a clock's least spread, and the last digit of records that have none.
RESOLUTION = 0.1
TIMES = ("forward_us", "backward_us", "both_us", "rounding_us", "exact_us", "duration_us")
TIMED = Bench | ExactGrad | Profile
# What follows from times, moves as they do, or is the host's.
DERIVED = {
    "forward_ratio", "both_ratio", "peer_ratio", "terabytes_per_second", "host_us", "host_grad_us",
    "host_train_us", "eager_us", "eager_train_us", "hard_data", "forward_spread_us",
    "backward_spread_us", "rounding_spread_us", "exact_spread_us", "overhead",
    "end_of_block_host_us", "dram_pct", "dram_read_mib", "dram_written_mib", "sm_pct", "tensor_pct",
    "issue_pct", "occupancy_pct", "l2_hit_pct", "stall", "stalled_warps_per_issue",
}  # fmt: skip


def differences(a: Document, b: Document) -> Iterator[str]:
    """A line for each row or value that differs in more than noise.

    Raises:
        RlkError: the records are of different kinds, or one has two rows of one key.
    """
    kinds = [record.__struct_config__.tag for record in (a, b)]
    if kinds[0] != kinds[1]:
        raise RlkError(f"records must be of one kind, got {kinds[0]} and {kinds[1]}")
    ours, theirs = (_rows(record, KEYS[str(kinds[0])]) for record in (a, b))
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        name = " ".join(key)
        if key not in theirs:
            yield f"{name}: only in the first"
        elif key not in ours:
            yield f"{name}: only in the second"
        else:
            yield from _values(name, ours[key], theirs[key], isinstance(a, TIMED))


def _rows(record: Document, keys: Iterable[str]) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for row in record.rows:
        key = tuple(str(getattr(row, name)) for name in keys)
        if key in found:
            # Only one of them would be compared.
            raise RlkError(f"records must have one row of a key, got two of {' '.join(key)}")
        found[key] = row
    return found


def _values(name: str, a: Any, b: Any, timed: bool) -> Iterator[str]:
    for field in a.__struct_fields__:
        x, y = getattr(a, field), getattr(b, field)
        if x == y or (timed and field in DERIVED):
            continue
        if timed and field in TIMES and x is not None and y is not None:
            spreads = [getattr(row, f"{field[:-3]}_spread_us", None) or 0.0 for row in (a, b)]
            if abs(y - x) > max(NOISE * x, SPREADS * max(spreads)):
                change = f" ({100 * (y / x - 1):+.1f} %)" if x else ""
                yield f"{name}: {field} {x:g} -> {y:g}{change}"
            continue
        yield f"{name}: {field} {x} -> {y}"


def losses(before: Bench, after: Bench) -> Iterator[str]:
    """A line for each ratio of ours, to the floor or to a named peer, that has grown too much.

    Ratios are of one run, and so free of clocks and heat that differ between two. A peer of another
    version is another peer.
    """
    earlier, later = (_rows(record, KEYS["rlk.bench/2"]) for record in (before, after))
    for key in sorted(earlier.keys() & later.keys()):
        if not later[key].ours:
            continue
        for other in sorted(_beside(key, earlier) & _beside(key, later)):
            pairs = [(rows[key], rows[other]) for rows in (earlier, later)]
            if other[-1] != FLOOR and pairs[0][1].version != pairs[1][1].version:
                continue
            for what in ("forward_us", "both_us"):
                yield from _loss(f"{' '.join(key)}: {what[:-3]} / {other[-1]}", what, *pairs)


def _beside(key: tuple[str, ...], rows: Mapping[tuple[str, ...], Any]) -> set[tuple[str, ...]]:
    """The floor and the other libraries at the place of a row."""
    return {other for other in rows if other[:-1] == key[:-1] and not rows[other].ours}


def _loss(name: str, what: str, before: tuple[Any, Any], after: tuple[Any, Any]) -> Iterator[str]:
    ratios, noise = [], 0.0
    for mine, other in (before, after):
        time, reference = getattr(mine, what), getattr(other, what)
        if not time or not reference:
            return
        ratios.append(time / reference)
        for row, us in ((mine, time), (other, reference)):
            spread = (row.forward_spread_us or 0.0) + (row.backward_spread_us or 0.0)
            noise = max(noise, SPREADS * max(spread, RESOLUTION) / us)
    x, y = ratios
    if y / x - 1 > max(LOSS, noise):
        yield f"{name} {x:.3g} -> {y:.3g} ({100 * (y / x - 1):+.1f} %)"


def main(arguments: list[str]) -> int:
    """The exit status."""
    if len(arguments) != 2:
        print("usage: compare_records.py A B", file=sys.stderr)
        return 2
    try:
        a, b = (decode(Path(path).read_bytes(), path) for path in arguments)
        found = list(differences(a, b))
    except (RlkError, OSError) as error:
        print(f"compare_records.py: {error}", file=sys.stderr)
        return 2
    for part in ("device", "driver", "torch", "triton", "commit"):
        x, y = (getattr(record.origin, part) for record in (a, b))
        if x != y:
            print(f"origin: {part} {x} -> {y}")
    print(*found, sep="\n" if found else "")
    print(f"{len(found)} differences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
