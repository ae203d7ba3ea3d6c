# SPDX-License-Identifier: Apache-2.0
"""Where reports go: proven writable before any work, written however the work ends."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from rlk.errors import RlkError
from rlk.gates import Report


@contextmanager
def writer(path: Path | None) -> Iterator[Callable[[Report], None]]:
    """Open a report file, emptying it; the value writes a report to it.

    An old report is gone from here on: it must not pass for the one of a run that was killed.

    Raises:
        RlkError: the file cannot be opened or written.
    """
    if path is None:
        yield lambda report: None
        return
    try:
        file = path.open("wb")
    except OSError as error:
        raise _unwritable("--json", path, error) from error

    def write(report: Report) -> None:
        # msgspec writes NaN and infinities as null.
        text = msgspec.json.format(msgspec.json.encode(report), indent=2)
        try:
            file.write(text + b"\n")
            file.flush()
        except OSError as error:
            raise _unwritable("--json", path, error) from error

    with file:
        yield write


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C: a second one must not cut the report short."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of reports, as published in `gates/report.schema.json`."""
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, **msgspec.json.schema(Report)}


def make_folder(path: Path) -> None:
    """Make the folder for dumped tensors.

    Raises:
        RlkError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable("--dump", path, error) from error


def _unwritable(option: str, path: Path, error: OSError) -> RlkError:
    return RlkError(f"gate: {option} must be writable, got {path} ({error.strerror})")
