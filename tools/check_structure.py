# SPDX-License-Identifier: Apache-2.0
"""Check the rules of the source tree that no linter knows.

`python tools/check_structure.py [ROOT]` prints `path:line: rule: what is wrong` and exits 1 if
anything is. Each rule is one function of the tree, in tools/structure/.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from structure import docstrings, drawing, files, names, supply, tolerances
from structure.tree import Tree, Violation

RULES: tuple[Callable[[Tree], Iterator[Violation]], ...] = (
    files.file_length,
    files.function_length,
    files.licence_header,
    files.typed_marker,
    files.vague_name,
    files.test_name,
    files.result_file,
    files.operator_folder,
    tolerances.literal_tolerance,
    names.dotted_import_string,
    names.one_way_import,
    names.model_name,
    names.operator_name,
    docstrings.public_docstring,
    supply.shipped_code,
    drawing.drawn_tree,
)


def check(root: Path) -> list[Violation]:
    """Every violation in the tree, by path and line."""
    tree = Tree(root)
    found = [violation for rule in RULES for violation in rule(tree)]
    return sorted(found, key=lambda violation: (violation.path, violation.line))


def main(arguments: list[str]) -> int:
    """The exit status: 1 if a rule is broken."""
    violations = check(Path(arguments[0] if arguments else "."))
    for violation in violations:
        print(violation)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
