# SPDX-License-Identifier: Apache-2.0
"""`rlk report`: one page of everything that the records of a folder say."""

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from rlk.cli.console import console
from rlk.errors import RlkError
from rlk.records import load_folder

NAMES = ("report.html", "report.md")


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of JSON records.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder for report.html and report.md; DIR if none.")
    ] = None,
) -> None:
    """Write one HTML and one Markdown report, with plots, of all records under a folder."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RlkError(
            "report: the package matplotlib must be installed, got none; pip install "
            '"rlk-core[survey]"'
        )
    records = load_folder(folder)
    if not records:
        raise RlkError(
            f"report: {folder} must hold records of rlk gate, survey or bench, got none; give "
            "those commands --json"
        )
    # Draws, and so takes seconds to import.
    from rlk.report.page import page

    made = page(records)
    for name, text in zip(NAMES, (made.html(), made.markdown()), strict=True):
        path = (output or folder) / name
        try:
            path.write_text(text)
        except OSError as error:
            raise RlkError(
                f"report: --output must be writable, got {path} ({error.strerror})"
            ) from error
        console().print(f"wrote {path}", soft_wrap=True)
