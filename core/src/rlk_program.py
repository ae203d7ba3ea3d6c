# SPDX-License-Identifier: Apache-2.0
"""The program `rlk`, outside the package `rlk`: an interrupt while that loads is one sentence too.

Exit status: 0 passed, 1 judged red or interrupted, 2 usage or environment error.
"""

import os
import signal
from typing import Any

_INTERRUPTED = 1


def main() -> None:
    """Load `rlk` and run it."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # as for a process in the background
        signal.signal(signal.SIGINT, _leave)
    from rlk.cli import main as run

    signal.signal(signal.SIGINT, before)
    run()


def _leave(*_: Any) -> None:
    """End at once: extension modules turn an exception while they load into their own."""
    os.write(2, b"rlk: interrupted\n")
    os._exit(_INTERRUPTED)
