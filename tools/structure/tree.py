# SPDX-License-Identifier: Apache-2.0
"""What a rule looks at, and what it reports."""

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SOURCE_SUFFIXES = {".py", ".sh", ".cu", ".cuh", ".cpp", ".h"}
RECORDS = "docs/records/"


@dataclass(frozen=True)
class Violation:
    """One broken rule, at one place."""

    path: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


@dataclass(frozen=True)
class Source:
    """A Python file."""

    path: str
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the file."""
        return list(ast.walk(ast.parse(self.text, self.path)))

    @cached_property
    def docstrings(self) -> set[ast.AST]:
        """The string nodes that stand alone as statements."""
        return {node.value for node in self.nodes if isinstance(node, ast.Expr)}

    @property
    def is_test(self) -> bool:
        """Whether the file holds tests."""
        return (
            Path(self.path).name.startswith(("test_", "conftest")) or "/integration/" in self.path
        )

    def strings(self) -> Iterator[ast.Constant]:
        """Every string constant that is no docstring."""
        for node in self.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if node not in self.docstrings:
                    yield node


class Tree:
    """The files git knows or would add."""

    def __init__(self, root: Path) -> None:
        self.root = root
        command = ["git", "-C", str(root), "ls-files", "-z", "-co", "--exclude-standard"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        self.files = sorted(p for p in listed.split("\0") if p and (root / p).is_file())

    def text(self, path: str) -> str:
        """The content of a file."""
        return (self.root / path).read_text(encoding="utf-8", errors="replace")

    def lines(self, path: str) -> list[str]:
        """The lines of a file."""
        return self.text(path).splitlines()

    @cached_property
    def python(self) -> list[Source]:
        """Every Python file."""
        return [Source(path, self.text(path)) for path in self.files if path.endswith(".py")]

    @cached_property
    def operator_folders(self) -> dict[str, str]:
        """Operator name -> folder: a package's subfolder that holds an operator.py."""
        pattern = re.compile(r"(packages/[^/]+/src/[^/]+/([^/]+))/operator\.py")
        found = filter(None, map(pattern.fullmatch, self.files))
        return {match[2]: match[1] for match in found}

    def bases(self, operator: str) -> list[str]:
        """The operators of its package from whose declaration this one is derived."""
        declaration = f"{self.operator_folders[operator]}/operator.py"
        imported = {
            (node.module or "").removesuffix(".operator")
            for node in ast.walk(ast.parse(self.text(declaration)))
            if isinstance(node, ast.ImportFrom) and node.level == 2
        }
        return sorted(imported & self.operator_folders.keys())
