# SPDX-License-Identifier: Apache-2.0
"""Our docstrings as the API reference reads them, whose parser wants blank lines."""

import re
from typing import Any

import griffe

_SECTION = re.compile(r"(?<=\S)\n(?=(?:Args|Returns|Raises|Gradients|Order|Source):)")


class DocstringSections(griffe.Extension):
    """Puts the blank line in."""

    def on_instance(self, *, obj: griffe.Object, **arguments: Any) -> None:
        """Called for everything that has been read."""
        if obj.docstring is not None:
            obj.docstring.value = _SECTION.sub("\n\n", obj.docstring.value)
