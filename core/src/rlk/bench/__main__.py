# SPDX-License-Identifier: Apache-2.0
"""`python -m rlk.bench [OP...] [--all] [--rows N]... [--dtype D]...
[--layout L]... [--json FILE]`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch

from rlk.bench import report
from rlk.bench.measure import measure
from rlk.bench.work import works
from rlk.cli import select
from rlk.cli.console import complain
from rlk.errors import RlkError
from rlk.operator import FLOATS, Layout


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m rlk.bench", description=__doc__)
    parser.add_argument("operators", nargs="*", metavar="OP")
    parser.add_argument("--all", action="store_true", help="every operator")
    parser.add_argument("--rows", type=int, action="append", default=[], help="further row counts")
    parser.add_argument("--dtype", action="append", choices=FLOATS, help="bfloat16 if none")
    parser.add_argument(
        "--layout", action="append", choices=get_args(Layout), help="those declared if none"
    )
    parser.add_argument("--json", type=Path, help="file for the record")
    options = parser.parse_args(arguments)
    try:
        run(options)
    except RlkError as error:
        complain(str(error))
        return 2
    return 0


def run(options: argparse.Namespace) -> None:
    """Measure, print and record one size after another: an interrupted run keeps what it has."""
    if not torch.cuda.is_available():
        raise RlkError("bench: the machine must have an NVIDIA GPU, got none")
    if bool(options.operators) == options.all:
        raise RlkError("bench: operators must be named or --all; give one of the two")
    found = select.every() if options.all else select.named(options.operators)
    rows: list[dict] = []
    for operator in found:
        for name in options.dtype or ["bfloat16"]:
            dtype = getattr(torch, name)
            for work in works(operator, dtype, options.rows, options.layout or ()):
                measured = measure(work)
                torch.cuda.empty_cache()
                print(report.table(measured), flush=True)
                rows += measured
                if options.json is not None:
                    report.write(options.json, rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
