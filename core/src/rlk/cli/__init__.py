# SPDX-License-Identifier: Apache-2.0
"""The command line `rlk`.

Exit status: 0 passed, 1 judged red or interrupted, 2 usage or environment error.
"""

import os
import signal
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from rlk import interpreter
from rlk.cli.bench import bench
from rlk.cli.bits import bits
from rlk.cli.build import build
from rlk.cli.cache import cache
from rlk.cli.check import check
from rlk.cli.console import complain
from rlk.cli.doctor import doctor
from rlk.cli.env import env
from rlk.cli.gate import gate
from rlk.cli.list_operators import list_operators
from rlk.cli.report import report
from rlk.cli.show import show
from rlk.cli.survey import survey
from rlk.errors import RlkError

__all__ = ["app", "main"]

RED = 1
CANNOT_JUDGE = 2


class Commands(TyperGroup):
    """The commands, with our errors as one sentence and their exit status."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command of this context."""
        try:
            return super().invoke(ctx)
        except RlkError as error:
            complain(str(error))
            raise typer.Exit(CANNOT_JUDGE) from error
        except KeyboardInterrupt as error:
            complain("interrupted")
            raise typer.Exit(RED) from error


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def start() -> None:
    """Batch-invariant GPU operators: what is installed, and whether its claims hold.

    Exit status: 0 passed, 1 judged red or interrupted, 2 usage or environment error.
    """
    # Before a command imports Triton kernels: they decide at import how they run.
    interpreter.enable_without_gpu()


app.command("list")(list_operators)
app.command()(show)
app.command()(env)
app.command()(doctor)
app.command()(build)
app.command()(cache)
app.command()(bits)
app.command()(check)
app.command()(gate)
app.command()(survey)
app.command()(bench)
app.command()(report)


def main() -> None:
    """Run the command of this process's arguments."""
    try:
        try:
            app(prog_name="rlk")
        finally:
            sys.stdout.flush()
    except OSError as error:
        complain(f"{error.filename or 'output'} must be usable, got {error.strerror or error}")
        # The interpreter flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(CANNOT_JUDGE)
    except KeyboardInterrupt:  # a second one, while the first was answered
        complain("interrupted")
        sys.exit(RED)
    finally:
        # What is left is the end of the process.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
