# SPDX-License-Identifier: Apache-2.0
"""The tree that ARCHITECTURE.md draws is the one that is here."""

import re
from collections.abc import Iterator

from structure.tree import Tree, Violation

PAGE = "ARCHITECTURE.md"
CORE = "core/src/rlk/"
DRAWN = re.compile(r"[\w./-]+(?:/|\.(?:py|sh))")


def drawn_tree(tree: Tree) -> Iterator[Violation]:
    """Every module and folder of core is drawn, and what is drawn is there."""
    if PAGE not in tree.files:
        return
    before, _, after = tree.text(PAGE).partition("## Tree\n")
    line = before.count("\n") + 1
    words = {word.strip(",;:") for word in after.partition("\n```\n")[0].split()}
    drawn = {word for word in words if DRAWN.fullmatch(word)}
    for name in sorted(drawn):
        if not any(f"/{name}" in f"/{path}" for path in tree.files):
            yield Violation(PAGE, line, "drawn-tree", f"{name} is not there")
    for name in sorted(_of_core(tree) - {re.sub(r"(?<=/).*", "", word) for word in drawn}):
        yield Violation(PAGE, line, "drawn-tree", f"{CORE}{name} is missing")


def _of_core(tree: Tree) -> set[str]:
    """Folders, and modules that are no tests."""
    found = set()
    for path in tree.files:
        folder, slash, _ = path.removeprefix(CORE).partition("/")
        module = folder.endswith(".py") and not folder.startswith(("test_", "__init__"))
        if path.startswith(CORE) and (slash or module):
            found.add(folder + slash)
    return found
