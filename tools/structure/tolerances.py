# SPDX-License-Identifier: Apache-2.0
"""No numeric bound stands outside the contract."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from structure.tree import RECORDS, SOURCE_SUFFIXES, Source, Tree, Violation

CONTRACT = "core/src/rlk/contract/"
TOLERANCE = re.compile(r"(?:^|_)(?:[ar]tol|tol|tolerance|max_ulp|max_error)(?:$|_)")
TOLERANCE_TEXT = re.compile(r"\b[ar]tol\b\W{1,4}\d")
JUDGED_QUANTITY = re.compile(r"(?:^|_)(?:ulps?|errors?)(?:$|_)")
ORDERINGS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
CLOSE_CALLS = {"allclose", "isclose", "assert_close", "assert_allclose", "approx"}
CLOSE_KEYWORDS = {"atol", "rtol", "abs", "rel", "abs_tol", "rel_tol"}


def literal_tolerance(tree: Tree) -> Iterator[Violation]:
    """No numeric bound stands outside the contract."""
    for path in tree.files:
        if path.startswith((CONTRACT, RECORDS)):
            continue
        if path.endswith(".py"):
            for line, what in _python_tolerances(Source(path, tree.text(path))):
                yield Violation(
                    path, line, "literal-tolerance", f"{what}: take it from rlk.contract"
                )
        elif Path(path).suffix in SOURCE_SUFFIXES | {".json", ".toml"}:
            for number, line in enumerate(tree.text(path).splitlines(), 1):
                if TOLERANCE_TEXT.search(line):
                    yield Violation(path, number, "literal-tolerance", line.strip())


def _python_tolerances(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes:
        for name, value in _named_values(node):
            if TOLERANCE.search(name.lower()) and _has_number(value):
                yield value.lineno, f"{name} is a number"
        if isinstance(node, ast.Call) and _called(node) in CLOSE_CALLS:
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            if not CLOSE_KEYWORDS & given.keys() and None not in given:
                yield node.lineno, f"{_called(node)} with its default tolerance"
            elif any(_has_number(v) for k, v in given.items() if k in CLOSE_KEYWORDS):
                yield node.lineno, f"{_called(node)} with a number"
        if isinstance(node, ast.Compare) and isinstance(node.ops[-1], ORDERINGS):
            sides = [node.left, *node.comparators]
            if any(_is_bound(side) for side in sides) and any(_is_error(side) for side in sides):
                yield node.lineno, "an error compared with a number"


def _named_values(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign):
        yield from ((ast.unparse(target), node.value) for target in node.targets)
    elif isinstance(node, ast.AnnAssign) and node.value:
        yield ast.unparse(node.target), node.value
    elif isinstance(node, ast.keyword) and node.arg:
        yield node.arg, node.value
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value, value
    elif isinstance(node, ast.arguments):
        named = [*node.posonlyargs, *node.args]
        yield from _pairs(named[len(named) - len(node.defaults) :], node.defaults)
        yield from _pairs(node.kwonlyargs, node.kw_defaults)


def _pairs(
    names: list[ast.arg], defaults: list[ast.expr] | list[ast.expr | None]
) -> Iterator[tuple[str, ast.expr]]:
    yield from ((a.arg, d) for a, d in zip(names, defaults, strict=True) if d is not None)


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _has_number(node: ast.expr) -> bool:
    """A number, or one inside a sign, a sum or product, or a literal collection."""
    if isinstance(node, ast.UnaryOp):
        return _has_number(node.operand)
    if isinstance(node, ast.BinOp):
        return _has_number(node.left) and _has_number(node.right)
    if isinstance(node, ast.Tuple | ast.List):
        return any(_has_number(element) for element in node.elts)
    if isinstance(node, ast.Dict):
        return any(_has_number(value) for value in node.values)
    return _is_number(node)


def _is_bound(node: ast.expr) -> bool:
    """A number other than 0: comparing an error with 0 is comparing bits."""
    return _has_number(node) and not (isinstance(node, ast.Constant) and node.value == 0)


def _is_error(node: ast.expr) -> bool:
    """An expression named for an error, or the absolute value of a difference."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name | ast.Attribute):
            if JUDGED_QUANTITY.search(_last_name(part).lower()):
                return True
        if isinstance(part, ast.Call) and _called(part) in ("abs", "fabs"):
            if any(isinstance(p, ast.BinOp) and isinstance(p.op, ast.Sub) for p in ast.walk(part)):
                return True
    return False


def _last_name(node: ast.expr) -> str:
    return getattr(node, "attr", None) or getattr(node, "id", "")


def _called(node: ast.Call) -> str:
    return _last_name(node.func)
