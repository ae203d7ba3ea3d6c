# SPDX-License-Identifier: Apache-2.0
"""Sections of a page, and links that follow it to its place on the site."""

import os
import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from docs_pages.errors import StageError

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^()\s]+)\)")
_FENCE = re.compile(r"^(```|~~~)")
_FOREIGN = re.compile(r"^[a-z]+:")


def headings(text: str) -> list[str]:
    """The headings of the second level."""
    return re.findall(r"^## (.+)$", text, re.MULTILINE)


def before(text: str, heading: str, addition: str) -> str:
    """The text with something put in front of a heading of the second level."""
    return text.replace(f"\n## {heading}\n", f"\n{addition.strip()}\n\n## {heading}\n", 1)


def move_links(
    text: str, source: str, target: str, pages: Mapping[str, str], files: set[str]
) -> str:
    """Point the links of a page at the pages of the site.

    Args:
        text: the page.
        source: its path in the repository, to which its links are relative.
        target: its path on the site.
        pages: path on the site by path in the repository.
        files: every path of the repository; a link to one that is no page becomes its text.
    Raises:
        StageError: a link leads nowhere.
    """

    def moved(match: re.Match[str]) -> str:
        image, words, address = match.groups()
        path, _, anchor = address.partition("#")
        if _FOREIGN.match(address) or not path:
            return match[0]
        joined = os.path.normpath(PurePosixPath(source).parent / path)
        if joined in pages:
            here = os.path.relpath(pages[joined], PurePosixPath(target).parent)
            return f"{image}[{words}]({here}{'#' + anchor if anchor else ''})"
        if joined in files or any(file.startswith(f"{joined}/") for file in files):
            return words if words.startswith("`") else f"{words} (`{joined}`)"
        raise StageError(f"{source}: link {address} must lead to a file, got none")

    lines, fenced = [], False
    for line in text.split("\n"):
        fenced ^= bool(_FENCE.match(line))
        lines.append(line if fenced or line.startswith("    ") else _LINK.sub(moved, line))
    return "\n".join(lines)
