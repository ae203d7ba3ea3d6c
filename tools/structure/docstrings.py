# SPDX-License-Identifier: Apache-2.0
"""What a package exports says what it takes, returns and raises."""

import ast
import re
from collections.abc import Iterator

from structure.tree import Tree, Violation

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module


def public_docstring(tree: Tree) -> Iterator[Violation]:
    """What a distribution or an operator folder exports, and what an exported module exports."""
    entries = [f"{folder}/__init__.py" for folder in tree.operator_folders.values()]
    entries += filter(
        re.compile(r"(?:core|packages/[^/]+)/src/[^/]+/__init__\.py").fullmatch, tree.files
    )
    seen: set[tuple[str, str]] = {(path, "") for path in entries}
    queue = sorted(seen)
    while queue:
        path, _ = queue.pop()
        for name in _exports(ast.parse(tree.text(path))):
            found = _resolve(tree, path, name)
            if found is None:
                yield Violation(path, 1, "public-docstring", f"{name} is exported, not found")
            elif found not in seen:
                seen.add(found)
                yield from _check(tree, *found)
                if not found[1]:
                    queue.append(found)


def _exports(module: ast.Module) -> list[str]:
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def _resolve(tree: Tree, path: str, name: str) -> tuple[str, str] | None:
    """(file, name) of the definition behind an exported name; the name is "" for a module."""
    for node in ast.walk(ast.parse(tree.text(path))):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _follow(tree, path, node, alias.name)
        elif isinstance(node, Definition) and getattr(node, "name", None) == name:
            return path, name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(ast.unparse(target) == name for target in targets):
                return path, name
    return None


def _follow(tree: Tree, path: str, node: ast.ImportFrom, name: str) -> tuple[str, str] | None:
    source, package = re.match(r"(.*?src)/(.*)/__init__\.py|(.*)", path).group(1, 2)
    if source is None:
        return None
    parts = (node.module or "").split(".") if node.module else []
    if node.level:
        above = package.split("/")
        parts = above[: len(above) - node.level + 1] + parts
    base = "/".join([source, *parts])
    if not node.level and parts[0] == "rlk":
        base = "/".join(["core/src", *parts])
    for module in (f"{base}/{name}/__init__.py", f"{base}/{name}.py"):
        if module in tree.files:
            return module, ""
    for module in (f"{base}.py", f"{base}/__init__.py"):
        if module in tree.files and module != path:
            return _resolve(tree, module, name)
    return None


def _check(tree: Tree, path: str, name: str) -> Iterator[Violation]:
    module = ast.parse(tree.text(path))
    nodes: list[ast.AST] = [module] if not name else list(ast.walk(module))
    for node in nodes:
        if isinstance(node, Definition) and getattr(node, "name", "") == name:
            if _is_overload(node):
                continue
            line = getattr(node, "lineno", 1)
            for message in _missing(node):
                yield Violation(path, line, "public-docstring", f"{name or path}: {message}")


def _is_overload(node: Definition) -> bool:
    """Whether it is a signature alone, of a function that is defined below."""
    return any(ast.unparse(d) == "overload" for d in getattr(node, "decorator_list", []))


def _missing(node: Definition) -> Iterator[str]:
    text = ast.get_docstring(node)
    if not text:
        yield "a docstring is missing"
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = _arguments(node)
        returns_nothing = isinstance(node.returns, ast.Constant) and node.returns.value is None
        sections = {
            "Args:": bool(arguments),
            "Returns:": bool(arguments) and not returns_nothing,
            "Raises:": bool(arguments),
        }
        for section, needed in sections.items():
            if needed and section not in text:
                yield f"the section {section} is missing"
        described = text.partition("Args:")[2]
        for argument in arguments if described else []:
            if not re.search(rf"\b{argument}\b", described):
                yield f"argument {argument} is not described"


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    spec = node.args
    named = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
    return [argument.arg for argument in named if argument.arg not in ("self", "cls")]
