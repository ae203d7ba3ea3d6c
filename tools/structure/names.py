# SPDX-License-Identifier: Apache-2.0
"""Who may name whom: imports one way, no module in a string, no operator outside its folder."""

import ast
import re
from collections.abc import Iterator

from structure.tree import Source, Tree, Violation

MODEL_WORDS = re.compile("qwen", re.IGNORECASE)
ENTRY_POINT_GROUPS = {"rlk.operators"}
NAMING = re.compile(
    r"packages/[^/]+/src/[^/]+/(?:__init__\.py$|patching/|integrations/|[^/]+/rollout\.py$)"
)
DOTTED_MODULE = re.compile(r"rlk(?:_\w+)?(?:\.\w+)+(?::\w+)?|\w+(?:\.\w+)+:\w+")
FILE_NAME = re.compile(r".*\.(?:cuh?|h|json|md|py|sh|so|toml)")
IMPORTERS = {"import_module", "__import__", "find_spec", "resolve_name", "patch", "setattr"}


def dotted_import_string(tree: Tree) -> Iterator[Violation]:
    """Modules are imported, not named in strings; entry points name packages."""
    for source in tree.python:
        for line, text in _import_strings(source):
            message = f"{text!r}: import the module, or discover it"
            yield Violation(source.path, line, "dotted-import-string", message)


def _import_strings(source: Source) -> Iterator[tuple[int, str]]:
    """In tests only what a call would import counts: they also look into sys.modules."""
    calls = [node for node in source.nodes if isinstance(node, ast.Call) and node.args]
    imported = {call.args[0] for call in calls if _called(call) in IMPORTERS}
    sequences = [call.args for call in calls]
    sequences += [node.elts for node in source.nodes if isinstance(node, ast.List)]
    run = {
        module
        for sequence in sequences
        for option, module in zip(sequence, sequence[1:], strict=False)
        if isinstance(option, ast.Constant) and option.value == "-m"
    }
    for node in source.strings():
        text = str(node.value)
        module = DOTTED_MODULE.fullmatch(text) and not FILE_NAME.fullmatch(text)
        dotted = module and not source.is_test
        if dotted or (node in imported and "." in text):
            if text not in ENTRY_POINT_GROUPS and node not in run:
                yield node.lineno, text


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", None) or getattr(node.func, "id", "")


def one_way_import(tree: Tree) -> Iterator[Violation]:
    """Packages import core and nothing of each other; core imports no package."""
    for source in tree.python:
        owner = re.match(r"core/()|packages/([^/]+)/", source.path)
        own = owner[2].replace("-", "_") if owner and owner[2] else ""
        for node in source.nodes if owner else []:
            for name in _imported_roots(node):
                if name.startswith("rlk_") and name != own:
                    message = f"must not import {name}; look operators up in the registry"
                    yield Violation(source.path, node.lineno, "one-way-import", message)


def _imported_roots(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [(node.module or "").split(".")[0]]
    return []


def model_name(tree: Tree) -> Iterator[Violation]:
    """Core never names a model."""
    for path in tree.files:
        for number, line in enumerate(tree.lines(path) if path.startswith("core/") else [], 1):
            if MODEL_WORDS.search(line):
                yield Violation(path, number, "model-name", "core must not name a model")


def operator_name(tree: Tree) -> Iterator[Violation]:
    """An operator's name stands in its folder, the package's export, the manifest and tests.

    Patching and integrations say which operator they put where, and engines may call theirs the
    same. Operators of one package may import each other's files relatively.
    """
    if not tree.operator_folders:
        return
    word = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, tree.operator_folders))})(?!\w)")
    for source in tree.python:
        if source.is_test or NAMING.match(source.path):
            continue
        own = [n for n, f in tree.operator_folders.items() if source.path.startswith(f"{f}/")]
        for line, text in _spoken(source, in_operator=bool(own)):
            for name in set(word.findall(text)) - set(own):
                message = f"{name} must not be named here; look it up in the registry"
                yield Violation(source.path, line, "operator-name", message)


def _spoken(source: Source, in_operator: bool) -> Iterator[tuple[int, str]]:
    """Identifiers, imported names and strings with their lines; docstrings are free."""
    for node in source.nodes:
        if isinstance(node, ast.Name | ast.Attribute):
            yield node.lineno, getattr(node, "id", None) or getattr(node, "attr", "")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            relative = isinstance(node, ast.ImportFrom) and node.level > 0
            if not (relative and in_operator):
                yield from ((node.lineno, alias.name) for alias in node.names)
                yield node.lineno, getattr(node, "module", None) or ""
    yield from ((node.lineno, str(node.value)) for node in source.strings())
