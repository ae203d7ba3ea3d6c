# SPDX-License-Identifier: Apache-2.0
"""Rules about single files: sizes, headers, names, completeness."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

from structure.tree import RECORDS, SOURCE_SUFFIXES, Tree, Violation

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
SPDX = "SPDX-License-Identifier: Apache-2.0"
VAGUE_NAMES = {"utils", "util", "helper", "helpers", "common", "misc", "new", "v2"}
TEST_NAME = re.compile(r"test_[a-z0-9]+(?:_[a-z0-9]+){2,}")
RESULT_SUFFIXES = {".csv", ".tsv", ".log", ".npy", ".npz", ".pt", ".pkl", ".parquet", ".xlsx"}
OPERATOR_FILES = ("__init__.py", "operator.py", "oracle.py", "page.md")
BACKEND_FILES = ("golden.py", "kernel_triton.py")


def file_length(tree: Tree) -> Iterator[Violation]:
    """A file is at most 400 lines."""
    for path in tree.files:
        lines = tree.text(path).count("\n") if Path(path).suffix in SOURCE_SUFFIXES else 0
        if lines > MAX_FILE_LINES:
            yield Violation(path, lines, "file-length", f"{lines} lines; split by concern")


def function_length(tree: Tree) -> Iterator[Violation]:
    """A function is at most 60 lines."""
    for source in tree.python:
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    message = f"{node.name} has {lines} lines; at most {MAX_FUNCTION_LINES}"
                    yield Violation(source.path, node.lineno, "function-length", message)


def licence_header(tree: Tree) -> Iterator[Violation]:
    """Every source file names its licence in the first line, or in the second after `#!`."""
    for path in tree.files:
        if Path(path).suffix in SOURCE_SUFFIXES or tree.text(path).startswith("#!"):
            head = tree.text(path).splitlines()[:2]
            wanted = head[1:] if head and head[0].startswith("#!") else head[:1]
            if not any(SPDX in line for line in wanted):
                yield Violation(path, 1, "licence-header", f"must start with '{SPDX}'")


def typed_marker(tree: Tree) -> Iterator[Violation]:
    """Every distribution ships py.typed."""
    pattern = re.compile(r"((?:core|packages/[^/]+)/src/[^/]+)/__init__\.py")
    for match in filter(None, map(pattern.fullmatch, tree.files)):
        if f"{match[1]}/py.typed" not in tree.files:
            yield Violation(match[0], 1, "typed-marker", f"{match[1]}/py.typed is missing")


def vague_name(tree: Tree) -> Iterator[Violation]:
    """A module says what it holds."""
    for source in tree.python:
        for part in (Path(source.path).stem, Path(source.path).parent.name):
            if part in VAGUE_NAMES:
                yield Violation(source.path, 1, "vague-name", f"{part!r} says nothing")


def test_name(tree: Tree) -> Iterator[Violation]:
    """Tests are named test_<subject>_<condition>_<expectation>."""
    for source in tree.python:
        for node in source.nodes if source.is_test else []:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                if not TEST_NAME.fullmatch(node.name):
                    message = f"{node.name}: say subject, condition and expectation"
                    yield Violation(source.path, node.lineno, "test-name", message)


def result_file(tree: Tree) -> Iterator[Violation]:
    """Results live in docs/records, and only as JSON records."""
    for path in tree.files:
        suffix = Path(path).suffix
        if suffix in RESULT_SUFFIXES or (
            suffix == ".json" and not path.startswith(RECORDS) and _is_report(tree.text(path))
        ):
            yield Violation(path, 1, "result-file", f"results belong to {RECORDS} as JSON records")


def _is_report(text: str) -> bool:
    try:
        document = json.loads(text)
    except ValueError:
        return False
    return isinstance(document, dict) and "records" in document


def operator_folder(tree: Tree) -> Iterator[Violation]:
    """An operator's folder is complete; a variant may use the backends of its base."""
    for name, folder in tree.operator_folders.items():
        backends = () if tree.bases(name) else BACKEND_FILES
        for file in (*OPERATOR_FILES, f"test_{name}.py", *backends):
            if f"{folder}/{file}" not in tree.files:
                yield Violation(f"{folder}/operator.py", 1, "operator-folder", f"{file} is missing")
