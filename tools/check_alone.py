# SPDX-License-Identifier: Apache-2.0
"""Check that an environment holds core and the package under test, and no other of ours.

`python tools/check_alone.py TEST_PATH...` takes the paths whose tests are about to run, such as
packages/rlk-rope/src; exits with 1 and one sentence if another package is installed too, on which
the tested one could come to depend unnoticed.
"""

import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points


def beside(paths: Sequence[str], installed: Iterable[str]) -> list[str]:
    """Which installed packages of operators are none of those that the paths are in."""
    tested = {path.split("/")[1] for path in paths if path.startswith("packages/")}
    return sorted(set(installed) - tested)


def main(paths: Sequence[str]) -> int:
    """The exit status."""
    found = entry_points(group="rlk.operators")
    others = beside(paths, (entry.dist.name for entry in found if entry.dist is not None))
    if others:
        print(f"check_alone: {', '.join(paths)} must be tested alone, got {', '.join(others)} too")
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
