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
from rlk.records import Document
from rlk.records.files import text_of


@contextmanager
def writer(path: Path | None) -> Iterator[Callable[[Report], None]]:
    """Open a report file, emptying it; the value writes a report to it.

    An old report is gone from here on: it must not pass for the one of a run that was killed.

    Raises:
        RlkError: the file cannot be opened or written.
    """

    def encoded(report: Report) -> bytes:
        # msgspec writes NaN and infinities as null.
        return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"

    with _rewritten("gate", path) as write:
        yield lambda report: write(encoded(report))


@contextmanager
def record_writer(command: str, path: Path | None) -> Iterator[Callable[[Document], None]]:
    """The same for a record of `rlk bench` or `rlk survey`, which may be written several times.

    Raises:
        RlkError: the file cannot be opened or written.
    """
    with _rewritten(command, path) as write:
        yield lambda record: write(text_of(record).encode())


@contextmanager
def _rewritten(command: str, path: Path | None) -> Iterator[Callable[[bytes], None]]:
    """A file that each call of the value replaces the content of."""
    if path is None:
        yield lambda text: None
        return
    try:
        file = path.open("wb")
    except OSError as error:
        raise _unwritable(f"{command}: --json", path, error) from error

    def write(text: bytes) -> None:
        try:
            if file.seekable():
                file.seek(0)
                file.truncate()
            file.write(text)
            file.flush()
        except OSError as error:
            raise _unwritable(f"{command}: --json", path, error) from error

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
        raise _unwritable("gate: --dump", path, error) from error


def _unwritable(option: str, path: Path, error: OSError) -> RlkError:
    return RlkError(f"{option} must be writable, got {path} ({error.strerror})")
